// Linears of few rows: the weights are read once, in order, and that is what they cost. Included once per
// instruction set.
//
// `linear_prepare` brings the rows into one scratch (normalised, in the type that the dot product wants, padded with
// zeros). The weights are read as STREAMS streams that are far apart: a core's prefetcher follows each within a page
// only, and one stream alone gets two thirds of what eight get. So output n is row n % length of stream n / length,
// and a work item is SEGMENT rows of every stream, computed in tiles of up to MAX_ROWS rows of x by 4 streams. Each
// result has one accumulator that runs over all inputs: it is the same bits however many rows there are.
#pragma once

#include <cmath>
#include <type_traits>

#include "ops_attention.h"

namespace {

template <class T>
struct DotF32 {
  using Row = float;
  using Weight = T;
  using X = F;
  static constexpr int STEP = Simd::W;
  static X load_row(const float *p) { return Simd::load(p); }
  static X load_weight(const T *p) { return Simd::load(p); }
  static X load_weight_part(const T *p, int64_t n) { return Simd::load_part(p, n); }
  static F fma(X a, X b, F c) { return Simd::fma(a, b, c); }
};

#ifndef PHASOR_DOT_BF16
#define PHASOR_DOT_BF16 DotF32<Bf16>
#endif

inline int64_t padded_inputs(const PhasorLinear &a) { return round_up(a.num_inputs, PHASOR_ROW_PADDING); }

template <class T, class Row>
void prepare_of(const PhasorLinear &a, Row *scratch) {
  const int64_t padded = padded_inputs(a), count = a.num_inputs;
  const T *norm = static_cast<const T *>(a.norm);
  for (int64_t m = 0; m < a.num_rows; ++m) {
    const T *x = static_cast<const T *>(a.x) + m * a.x_stride;
    Row *row = scratch + m * padded;
    std::memset(row + count, 0, static_cast<size_t>(padded - count) * sizeof(Row));
    F factor = Simd::set1(1.0f);
    if (norm) {
      F squares = Simd::zero();
      for_vectors(
          count,
          [&](int64_t i) {
            const F v = Simd::load(x + i);
            squares = Simd::fma(v, v, squares);
          },
          [&](int64_t i, int64_t n) {
            const F v = Simd::load_part(x + i, n);
            squares = Simd::fma(v, v, squares);
          });
      factor = Simd::set1(1.0f / std::sqrt(Simd::sum(squares) / static_cast<float>(count) + a.norm_eps));
    }
    // As models are trained: the normalised row is rounded before it is multiplied with the weight.
    auto scaled = [&](F v, F weight) { return Simd::mul(rounded(Simd::mul(v, factor), x), weight); };
    for_vectors(
        count,
        [&](int64_t i) {
          const F v = Simd::load(x + i);
          Simd::store(row + i, norm ? rounded(scaled(v, Simd::load(norm + i)), x) : v);
        },
        [&](int64_t i, int64_t n) {
          const F v = Simd::load_part(x + i, n);
          Simd::store_part(row + i, norm ? rounded(scaled(v, Simd::load_part(norm + i, n)), x) : v, n);
        });
  }
}

constexpr int64_t STREAMS = 8;
constexpr int64_t SEGMENT = PHASOR_LINEAR_BLOCK / STREAMS;

inline int64_t stream_length(const PhasorLinear &a) { return (a.num_outputs + STREAMS - 1) / STREAMS; }

// to[m][4 streams, SEGMENT apart] = rows[m] . weight[stream] for ROWS rows. Meanwhile asks for FETCH of the weights
// that the next tile reads: they are spread over all tiles that use this one's.
template <class Dot, int ROWS, int FETCH>
inline void tile(const typename Dot::Row *rows, int64_t padded, const typename Dot::Weight *const *weight,
                 const typename Dot::Weight *const *ahead, int64_t count, float *to) {
  F sums[ROWS][4];
  for (int m = 0; m < ROWS; ++m)
    for (int j = 0; j < 4; ++j) sums[m][j] = Simd::zero();
  int64_t i = 0;
  for (; i + Dot::STEP <= count; i += Dot::STEP) {
    typename Dot::X loaded[4];
    for (int j = 0; j < 4; ++j) loaded[j] = Dot::load_weight(weight[j] + i);
    for (int j = 0; j < FETCH; ++j) prefetch(ahead[j] + i);
    for (int m = 0; m < ROWS; ++m) {
      const typename Dot::X x = Dot::load_row(rows + m * padded + i);
      for (int j = 0; j < 4; ++j) sums[m][j] = Dot::fma(x, loaded[j], sums[m][j]);
    }
  }
  if (i < count) {
    typename Dot::X loaded[4];
    for (int j = 0; j < 4; ++j) loaded[j] = Dot::load_weight_part(weight[j] + i, count - i);
    for (int m = 0; m < ROWS; ++m) {
      const typename Dot::X x = Dot::load_row(rows + m * padded + i);
      for (int j = 0; j < 4; ++j) sums[m][j] = Dot::fma(x, loaded[j], sums[m][j]);
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    float out[4];
    Simd::sum4(sums[m][0], sums[m][1], sums[m][2], sums[m][3], out);
    for (int j = 0; j < 4; ++j) to[m * PHASOR_LINEAR_BLOCK + j * SEGMENT] = out[j];
  }
}

// All rows of x against four weights, in tiles of MAX_ROWS.
template <class Dot, int FETCH>
inline void tiles(const PhasorLinear &a, const typename Dot::Row *rows, const typename Dot::Weight *const *weight,
                  const typename Dot::Weight *const *ahead, float *to) {
  const int64_t padded = padded_inputs(a);
  int64_t m = 0, fetched = 0;
  auto rows_of = [&](auto num_rows) {
    constexpr int ROWS = decltype(num_rows)::value;
    const typename Dot::Row *x = rows + m * padded;
    float *out = to + m * PHASOR_LINEAR_BLOCK;
    if (fetched + FETCH <= 4)
      tile<Dot, ROWS, FETCH>(x, padded, weight, ahead + fetched, a.num_inputs, out);
    else
      tile<Dot, ROWS, 0>(x, padded, weight, ahead, a.num_inputs, out);
    m += ROWS, fetched += FETCH;
  };
  while (a.num_rows - m >= Simd::MAX_ROWS) rows_of(std::integral_constant<int, Simd::MAX_ROWS>());
  if constexpr (Simd::MAX_ROWS > 3)
    if (a.num_rows - m == 3) rows_of(std::integral_constant<int, 3>());
  if constexpr (Simd::MAX_ROWS > 2)
    if (a.num_rows - m == 2) rows_of(std::integral_constant<int, 2>());
  if (a.num_rows - m == 1) rows_of(std::integral_constant<int, 1>());
}

// to[m][stream * SEGMENT + j] for rows `first` .. `first + length - 1` of every stream.
template <class Dot>
void block(const PhasorLinear &a, const typename Dot::Row *rows, const typename Dot::Weight *weight, int64_t first,
           int64_t length, float *to) {
  using Weight = typename Dot::Weight;
  // Rows past the last output are computed as copies of it, and not used.
  auto row_of = [&](int64_t stream, int64_t j) {
    const int64_t n = stream * stream_length(a) + first + j;
    return weight + (n < a.num_outputs ? n : a.num_outputs - 1) * a.num_inputs;
  };
  const Weight *now[4], *ahead[4];
  for (int k = 0; k < 4; ++k) ahead[k] = row_of(k, 0);
  for (int64_t j = 0; j < length; ++j) {
    for (int64_t half = 0; half < STREAMS; half += 4) {
      const bool last_half = half + 4 == STREAMS;
      for (int k = 0; k < 4; ++k) now[k] = ahead[k];
      for (int k = 0; k < 4; ++k) ahead[k] = last_half ? row_of(k, j + 1) : row_of(half + 4 + k, j);
      float *out = to + half * SEGMENT + j;
      if (a.num_rows <= Simd::MAX_ROWS)
        tiles<Dot, 4>(a, rows, now, ahead, out);
      else if (a.num_rows <= 2 * Simd::MAX_ROWS)
        tiles<Dot, 2>(a, rows, now, ahead, out);
      else
        tiles<Dot, 1>(a, rows, now, ahead, out);
    }
  }
}

// What happens to a block of sums on its way out.
template <class T, class Out>
void finish(const PhasorLinear &a, const float *sums, const float *ups, int64_t first, int64_t outputs) {
  const T *bias = static_cast<const T *>(a.bias), *residual = static_cast<const T *>(a.residual);
  for (int64_t m = 0; m < a.num_rows; ++m) {
    const float *from = sums + m * PHASOR_LINEAR_BLOCK, *up = ups + m * PHASOR_LINEAR_BLOCK;
    Out *to = static_cast<Out *>(a.out) + m * a.num_outputs + first;
    const T *add = residual ? residual + m * a.num_outputs + first : nullptr;
    auto value = [&](int64_t i, int64_t n) {
      F x = Simd::load_part(from + i, n);
      if (a.gated) {
        const F one = Simd::set1(1.0f);
        const F sigmoid = Simd::div(one, Simd::add(one, exponential(Simd::sub(Simd::zero(), x))));
        return Simd::mul(Simd::mul(x, sigmoid), Simd::load_part(up + i, n));
      }
      if (bias) x = Simd::add(x, Simd::load_part(bias + first + i, n));
      if (add) x = Simd::add(x, Simd::load_part(add + i, n));
      return x;
    };
    for_vectors(
        outputs, [&](int64_t i) { Simd::store(to + i, value(i, Simd::W)); },
        [&](int64_t i, int64_t n) { Simd::store_part(to + i, value(i, n), n); });
  }
}

template <class T, class Dot>
void linear_of(const PhasorLinear &a, const typename Dot::Row *rows, int64_t first, int64_t last) {
  const size_t block_bytes = static_cast<size_t>(a.num_rows * PHASOR_LINEAR_BLOCK) * sizeof(float);
  float *sums = static_cast<float *>(std::malloc(2 * block_bytes));
  float *ups = sums + a.num_rows * PHASOR_LINEAR_BLOCK;
  const T *weight = static_cast<const T *>(a.weight);
  const int64_t stream = stream_length(a);
  for (int64_t item = first; item < last; ++item) {
    const int64_t start = item * SEGMENT, length = stream - start < SEGMENT ? stream - start : SEGMENT;
    block<Dot>(a, rows, weight, start, length, sums);
    if (a.gated) block<Dot>(a, rows, weight + a.num_outputs * a.num_inputs, start, length, ups);
    for (int64_t s = 0; s < STREAMS; ++s) {
      const int64_t n = s * stream + start, left = a.num_outputs - n;
      const int64_t outputs = left < length ? left : length;
      if (outputs <= 0) break;
      if (a.out_type == PHASOR_F32)
        finish<T, float>(a, sums + s * SEGMENT, ups + s * SEGMENT, n, outputs);
      else
        finish<T, Bf16>(a, sums + s * SEGMENT, ups + s * SEGMENT, n, outputs);
    }
  }
  std::free(sums);
}

void linear_prepare(const PhasorLinear *a, void *scratch) {
  if (a->type == PHASOR_BF16)
    prepare_of<Bf16>(*a, static_cast<PHASOR_DOT_BF16::Row *>(scratch));
  else
    prepare_of<float>(*a, static_cast<float *>(scratch));
}

void linear(const PhasorLinear *a, const void *scratch, int64_t first, int64_t last) {
  if (a->type == PHASOR_BF16)
    linear_of<Bf16, PHASOR_DOT_BF16>(*a, static_cast<const PHASOR_DOT_BF16::Row *>(scratch), first, last);
  else
    linear_of<float, DotF32<float>>(*a, static_cast<const float *>(scratch), first, last);
}

}  // namespace
