// 16 lanes of float32.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

using Bf16 = uint16_t;

struct Simd {
  static constexpr int W = 16;
  static constexpr int MAX_ROWS = 4;  // rows of x per tile: 4 x 4 accumulators
  using F = __m512;

  static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
  static F widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float *p) { return _mm512_loadu_ps(p); }
  static F load(const Bf16 *p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
  static F load_part(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static F load_part(const Bf16 *p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
  static __m256i narrow(F x) {  // round to nearest even; NaN stays NaN
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static void store(float *p, F x) { _mm512_storeu_ps(p, x); }
  static void store(Bf16 *p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrow(x)); }
  static void store_part(float *p, F x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static void store_part(Bf16 *p, F x, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // A NaN in the second operand is the result.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F power_of_two(F n) { return _mm512_scalef_ps(set1(1.0f), n); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }
  // The sums of four vectors, as four floats.
  static void sum4(F a, F b, F c, F d, float *out) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
};

#if defined(__AVX512BF16__)
// Products of bfloat16 pairs, accumulated in float32.
struct DotBf16 {
  using Row = Bf16;     // how rows of x are prepared
  using Weight = Bf16;
  using X = __m512bh;
  static constexpr int STEP = 32;
  static X bits(__m512i x) { return reinterpret_cast<__m512bh>(x); }
  static X load_row(const Bf16 *p) { return bits(_mm512_loadu_si512(p)); }
  static X load_weight(const Bf16 *p) { return bits(_mm512_loadu_si512(p)); }
  static X load_weight_part(const Bf16 *p, int64_t n) {
    return bits(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1ull), p));
  }
  static __m512 fma(X a, X b, __m512 c) { return _mm512_dpbf16_ps(c, a, b); }
};
#define PHASOR_DOT_BF16 DotBf16
#endif

}  // namespace
