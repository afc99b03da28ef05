// 8 lanes of float32, with FMA.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using Bf16 = uint16_t;

struct Simd {
  static constexpr int W = 8;
  static constexpr int MAX_ROWS = 2;  // 2 x 4 accumulators leave room among 16 registers
  using F = __m256;

  static F widen(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float *p) { return _mm256_loadu_ps(p); }
  static F load(const Bf16 *p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
  template <class T>
  static F load_part(const T *p, int64_t n) {
    T lanes[W] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
    return load(lanes);
  }
  static void store(float *p, F x) { _mm256_storeu_ps(p, x); }
  static void store(Bf16 *p, F x) {  // round to nearest even; NaN stays NaN
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
    rounded = _mm256_srli_epi32(rounded, 16);
    const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm_packus_epi32(low, high));
  }
  template <class T>
  static void store_part(T *p, F x, int64_t n) {
    T lanes[W];
    store(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
  }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // A NaN in the second operand is the result.
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F power_of_two(F n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static float sum(F x) {
    float out[4];
    sum4(x, zero(), zero(), zero(), out);
    return out[0];
  }
  static float largest(F x) {
    float lanes[W];
    store(lanes, x);
    float found = lanes[0];
    for (int i = 1; i < W; ++i) found = lanes[i] > found ? lanes[i] : found;
    return found;
  }
  // The sums of four vectors, as four floats.
  static void sum4(F a, F b, F c, F d, float *out) {
    const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
  }
};

}  // namespace
