// Paged attention for single queries, and rotary with the write into pages. Included once per instruction set.
//
// One work item is one sequence and one KV head. Its tokens are taken in chunks of CHUNK rows, whatever the block
// size: a chunk is two lists of row pointers. Query heads of the group share each chunk while it is in the first
// level cache; the softmax is online, in float32.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "phasor_kernels.h"

namespace {

using F = Simd::F;

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline void prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }

// e^x to about 2 ulp. Below -87.3 it is 1e-38, above 88 it is 1.6e38; NaN stays NaN.
inline F exponential(F x) {
  x = Simd::min(Simd::set1(88.0f), Simd::max(Simd::set1(-87.3f), x));
  const F n = Simd::round(Simd::mul(x, Simd::set1(1.44269504088896341f)));
  F r = Simd::fma(n, Simd::set1(-0.693359375f), x);
  r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
  F p = Simd::set1(1.9875691500e-4f);
  p = Simd::fma(p, r, Simd::set1(1.3981999507e-3f));
  p = Simd::fma(p, r, Simd::set1(8.3334519073e-3f));
  p = Simd::fma(p, r, Simd::set1(4.1665795894e-2f));
  p = Simd::fma(p, r, Simd::set1(1.6666665459e-1f));
  p = Simd::fma(p, r, Simd::set1(5.0000001201e-1f));
  p = Simd::fma(Simd::mul(r, r), p, Simd::add(r, Simd::set1(1.0f)));
  return Simd::mul(p, Simd::power_of_two(n));
}

// Whole vectors first, then what is left of `count` elements.
template <class Whole, class Part>
inline void for_vectors(int64_t count, Whole whole, Part part) {
  int64_t i = 0;
  for (; i + Simd::W <= count; i += Simd::W) whole(i);
  if (i < count) part(i, count - i);
}

constexpr int CHUNK = 32;
constexpr int HEADS = 4;      // most query heads of a group that are computed together
constexpr int VECTORS = 4;    // vectors of the output that stay in registers while a chunk is added up

template <class T>
struct Chunk {
  const T *k[CHUNK];
  const T *v[CHUNK];
  int count;

  void fill(const PhasorAttention &a, int64_t sequence, int64_t kv_head, int64_t first) {
    const int64_t *table = a.tables + sequence * a.table_stride;
    const T *k_base = static_cast<const T *>(a.k_pages) + kv_head * a.k_head_stride;
    const T *v_base = static_cast<const T *>(a.v_pages) + kv_head * a.v_head_stride;
    const int64_t left = a.lengths[sequence] - first;
    count = static_cast<int>(left < CHUNK ? left : CHUNK);
    int64_t index = first / a.block_tokens, offset = first % a.block_tokens;
    for (int t = 0; t < count; ++t) {
      k[t] = k_base + table[index] * a.k_block_stride + offset * a.k_token_stride;
      v[t] = v_base + table[index] * a.v_block_stride + offset * a.v_token_stride;
      if (++offset == a.block_tokens) offset = 0, ++index;
    }
    // Four tokens are computed at a time: the missing ones repeat the last, and their scores are not used.
    for (int t = count; t > 0 && t % 4; ++t) k[t] = k[count - 1], v[t] = v[count - 1];
  }

  void prefetch_rows(int first, int64_t k_bytes, int64_t v_bytes) const {
    for (int t = first; t < first + 4 && t < count; ++t) {
      for (int64_t b = 0; b < k_bytes; b += 64) prefetch(reinterpret_cast<const char *>(k[t]) + b);
      for (int64_t b = 0; b < v_bytes; b += 64) prefetch(reinterpret_cast<const char *>(v[t]) + b);
    }
  }
};

// scores[p][t] = query[p] . k[t] for NUM heads; rows of `query` are padded with zeros to `padded`.
template <class T, int NUM>
inline void score(const Chunk<T> &chunk, const Chunk<T> &next, const float *query, int64_t k_dim,
                  int64_t v_bytes, int64_t padded, bool fetch, float (*scores)[CHUNK]) {
  for (int t = 0; t < chunk.count; t += 4) {
    if (fetch) next.prefetch_rows(t, k_dim * static_cast<int64_t>(sizeof(T)), v_bytes);
    F sums[NUM][4];
    for (int p = 0; p < NUM; ++p)
      for (int j = 0; j < 4; ++j) sums[p][j] = Simd::zero();
    auto add = [&](int64_t d, F k0, F k1, F k2, F k3) {
      for (int p = 0; p < NUM; ++p) {
        const F q = Simd::load(query + p * padded + d);
        sums[p][0] = Simd::fma(q, k0, sums[p][0]);
        sums[p][1] = Simd::fma(q, k1, sums[p][1]);
        sums[p][2] = Simd::fma(q, k2, sums[p][2]);
        sums[p][3] = Simd::fma(q, k3, sums[p][3]);
      }
    };
    const T *const *k = chunk.k + t;
    for_vectors(
        k_dim,
        [&](int64_t d) {
          add(d, Simd::load(k[0] + d), Simd::load(k[1] + d), Simd::load(k[2] + d), Simd::load(k[3] + d));
        },
        [&](int64_t d, int64_t n) {
          add(d, Simd::load_part(k[0] + d, n), Simd::load_part(k[1] + d, n), Simd::load_part(k[2] + d, n),
              Simd::load_part(k[3] + d, n));
        });
    for (int p = 0; p < NUM; ++p) Simd::sum4(sums[p][0], sums[p][1], sums[p][2], sums[p][3], scores[p] + t);
  }
}

// sums[p] = rescale[p] * sums[p] + weights[p] @ v for NUM heads and COUNT vectors at `e`.
template <class T, int NUM, int COUNT, bool PARTIAL>
inline void accumulate(const Chunk<T> &chunk, const float (*weights)[CHUNK], const float *rescale, int64_t e,
                       int64_t last_lanes, int64_t padded, float *sums) {
  F held[NUM][COUNT];
  for (int p = 0; p < NUM; ++p)
    for (int c = 0; c < COUNT; ++c)
      held[p][c] = Simd::mul(Simd::set1(rescale[p]), Simd::load(sums + p * padded + e + c * Simd::W));
  for (int t = 0; t < chunk.count; ++t) {
    F v[COUNT];
    for (int c = 0; c < COUNT; ++c) {
      const T *at = chunk.v[t] + e + c * Simd::W;
      v[c] = PARTIAL && c == COUNT - 1 ? Simd::load_part(at, last_lanes) : Simd::load(at);
    }
    for (int p = 0; p < NUM; ++p) {
      const F w = Simd::set1(weights[p][t]);
      for (int c = 0; c < COUNT; ++c) held[p][c] = Simd::fma(w, v[c], held[p][c]);
    }
  }
  for (int p = 0; p < NUM; ++p)
    for (int c = 0; c < COUNT; ++c) Simd::store(sums + p * padded + e + c * Simd::W, held[p][c]);
}

template <class T, int NUM>
inline void accumulate_all(const Chunk<T> &chunk, const float (*weights)[CHUNK], const float *rescale,
                           int64_t v_dim, int64_t padded, float *sums) {
  int64_t e = 0;
  for (; e + VECTORS * Simd::W <= v_dim; e += VECTORS * Simd::W)
    accumulate<T, NUM, VECTORS, false>(chunk, weights, rescale, e, 0, padded, sums);
  for (; e + Simd::W <= v_dim; e += Simd::W)
    accumulate<T, NUM, 1, false>(chunk, weights, rescale, e, 0, padded, sums);
  if (e < v_dim) accumulate<T, NUM, 1, true>(chunk, weights, rescale, e, v_dim - e, padded, sums);
}

// What NUM heads carry from chunk to chunk, one lane each.
constexpr int LANES = Simd::W;
static_assert(HEADS <= LANES && CHUNK % LANES == 0, "heads share a vector, and so do a chunk's scores");
struct Running {
  float largest[LANES];
  float total[LANES];
  float rescale[LANES];
};

// Turns scores into weights relative to the largest score so far.
template <int NUM>
inline void soften(Running &run, int count, float (*scores)[CHUNK]) {
  float before[LANES] = {}, added[LANES] = {};
  const int whole = static_cast<int>(round_up(count, Simd::W));
  for (int p = 0; p < NUM; ++p) {
    for (int t = count; t < whole; ++t) scores[p][t] = -INFINITY;
    F largest = Simd::load(scores[p]);
    for (int t = Simd::W; t < whole; t += Simd::W) largest = Simd::max(largest, Simd::load(scores[p] + t));
    const float found = Simd::largest(largest);
    before[p] = run.largest[p];
    run.largest[p] = found > before[p] ? found : before[p];
  }
  for (int p = 0; p < NUM; ++p) {
    const F largest = Simd::set1(run.largest[p]);
    F total = Simd::zero();
    for (int t = 0; t < whole; t += Simd::W) {
      const F weights = exponential(Simd::sub(Simd::load(scores[p] + t), largest));
      Simd::store(scores[p] + t, weights);
      // The lanes past the end are small, but not zero.
      total = Simd::add(total, count - t < Simd::W ? Simd::load_part(scores[p] + t, count - t) : weights);
    }
    added[p] = Simd::sum(total);
  }
  // All heads at once. In the first chunk the factors are 1e-38, and multiply zeros.
  const F rescale = exponential(Simd::sub(Simd::load(before), Simd::load(run.largest)));
  Simd::store(run.rescale, rescale);
  Simd::store(run.total, Simd::fma(Simd::load(run.total), rescale, Simd::load(added)));
}

template <class T, int NUM>
void attend_heads(const PhasorAttention &a, int64_t sequence, int64_t kv_head, int64_t head, float *scratch) {
  const int64_t k_padded = round_up(a.k_dim, Simd::W), v_padded = round_up(a.v_dim, Simd::W);
  float *query = scratch, *sums = scratch + NUM * k_padded;
  const T *from = static_cast<const T *>(a.query) + a.rows[sequence] * a.query_stride + head * a.k_dim;
  std::memset(scratch, 0, static_cast<size_t>(NUM * (k_padded + v_padded)) * sizeof(float));
  Running run = {};
  for (int p = 0; p < NUM; ++p) {
    const F scale = Simd::set1(a.scale);
    const T *row = from + p * a.k_dim;
    float *to = query + p * k_padded;
    for_vectors(
        a.k_dim, [&](int64_t d) { Simd::store(to + d, Simd::mul(scale, Simd::load(row + d))); },
        [&](int64_t d, int64_t n) { Simd::store(to + d, Simd::mul(scale, Simd::load_part(row + d, n))); });
    run.largest[p] = -INFINITY;
  }
  Chunk<T> chunks[2];
  float scores[HEADS][CHUNK];
  const int64_t length = a.lengths[sequence];
  chunks[0].fill(a, sequence, kv_head, 0);
  for (int64_t first = 0, turn = 0; first < length; first += CHUNK, ++turn) {
    const Chunk<T> &chunk = chunks[turn & 1];
    Chunk<T> &next = chunks[1 - (turn & 1)];
    const bool more = first + CHUNK < length;
    if (more) next.fill(a, sequence, kv_head, first + CHUNK);
    score<T, NUM>(chunk, next, query, a.k_dim, a.v_dim * static_cast<int64_t>(sizeof(T)), k_padded, more, scores);
    soften<NUM>(run, chunk.count, scores);
    accumulate_all<T, NUM>(chunk, scores, run.rescale, a.v_dim, v_padded, sums);
  }
  T *out = static_cast<T *>(a.out) + a.rows[sequence] * a.out_stride + head * a.v_dim;
  for (int p = 0; p < NUM; ++p) {
    const F inverse = Simd::set1(1.0f / run.total[p]);
    const float *row = sums + p * v_padded;
    T *to = out + p * a.v_dim;
    for_vectors(
        a.v_dim, [&](int64_t e) { Simd::store(to + e, Simd::mul(inverse, Simd::load(row + e))); },
        [&](int64_t e, int64_t n) { Simd::store_part(to + e, Simd::mul(inverse, Simd::load(row + e)), n); });
  }
}

template <class T>
void attention_of(const PhasorAttention &a, int64_t first, int64_t last) {
  const int64_t padded = round_up(a.k_dim, Simd::W) + round_up(a.v_dim, Simd::W);
  float *scratch = static_cast<float *>(std::malloc(static_cast<size_t>(HEADS * padded) * sizeof(float)));
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int64_t item = first; item < last; ++item) {
    const int64_t sequence = item / a.num_kv_heads, kv_head = item % a.num_kv_heads;
    for (int64_t p = 0; p < group;) {
      const int64_t head = kv_head * group + p, left = group - p;
      switch (left < HEADS ? left : HEADS) {
        case 1: attend_heads<T, 1>(a, sequence, kv_head, head, scratch); break;
        case 2: attend_heads<T, 2>(a, sequence, kv_head, head, scratch); break;
        case 3: attend_heads<T, 3>(a, sequence, kv_head, head, scratch); break;
        default: attend_heads<T, HEADS>(a, sequence, kv_head, head, scratch); break;
      }
      p += left < HEADS ? left : HEADS;
    }
  }
  std::free(scratch);
}

void attention(const PhasorAttention *a, int64_t first, int64_t last) {
  if (a->type == PHASOR_BF16)
    attention_of<Bf16>(*a, first, last);
  else
    attention_of<float>(*a, first, last);
}

// The value that a result has after it was stored as T: torch rounds after every operation.
inline F rounded(F x, const float *) { return x; }
inline F rounded(F x, const Bf16 *) {
  Bf16 lanes[Simd::W];
  Simd::store(lanes, x);
  return Simd::load(lanes);
}

// to = x * cos + rotate_half(x) * sin over the first `rotary_dim` elements, in torch's order of rounding.
template <class T>
inline void rotate(const T *x, const T *cos, const T *sin, int64_t rotary_dim, T *to) {
  const int64_t half = rotary_dim / 2;
  auto turn = [&](int64_t i, int64_t n) {
    const F low = Simd::load_part(x + i, n), high = Simd::load_part(x + half + i, n);
    const F low_cos = rounded(Simd::mul(low, Simd::load_part(cos + i, n)), x);
    const F low_sin = rounded(Simd::mul(high, Simd::load_part(sin + i, n)), x);
    const F high_cos = rounded(Simd::mul(high, Simd::load_part(cos + half + i, n)), x);
    const F high_sin = rounded(Simd::mul(low, Simd::load_part(sin + half + i, n)), x);
    Simd::store_part(to + i, Simd::sub(low_cos, low_sin), n);
    Simd::store_part(to + half + i, Simd::add(high_cos, high_sin), n);
  };
  for_vectors(half, [&](int64_t i) { turn(i, Simd::W); }, turn);
}

template <class T>
void rotary_of(const PhasorRotary &a) {
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const int64_t block = a.slot_blocks[t], offset = a.slot_offsets[t];
    const T *cos = static_cast<const T *>(a.cos), *sin = static_cast<const T *>(a.sin);
    if (cos) {
      cos += t * a.rotary_dim, sin += t * a.rotary_dim;
      T *query = static_cast<T *>(a.query) + t * a.query_stride;
      for (int64_t h = 0; h < a.num_heads; ++h) {
        // In place is safe: a pair is read before it is written, and pairs do not overlap.
        rotate(query + h * a.k_dim, cos, sin, a.rotary_dim, query + h * a.k_dim);
      }
    }
    const int64_t rotated = cos ? a.rotary_dim : 0;
    for (int64_t g = 0; g < a.num_kv_heads; ++g) {
      const T *key = static_cast<const T *>(a.key) + t * a.key_stride + g * a.k_dim;
      const T *value = static_cast<const T *>(a.value) + t * a.value_stride + g * a.v_dim;
      T *k = static_cast<T *>(a.k_pages) + block * a.k_block_stride + g * a.k_head_stride + offset * a.k_token_stride;
      T *v = static_cast<T *>(a.v_pages) + block * a.v_block_stride + g * a.v_head_stride + offset * a.v_token_stride;
      if (cos) rotate(key, cos, sin, a.rotary_dim, k);
      std::memcpy(k + rotated, key + rotated, static_cast<size_t>(a.k_dim - rotated) * sizeof(T));
      std::memcpy(v, value, static_cast<size_t>(a.v_dim) * sizeof(T));
    }
  }
}

void rotary(const PhasorRotary *a) {
  if (a->type == PHASOR_BF16)
    rotary_of<Bf16>(*a);
  else
    rotary_of<float>(*a);
}

}  // namespace
