// Plain C++ for any processor; the compiler makes of it what it can.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using Bf16 = uint16_t;

struct Simd {
  static constexpr int W = 4;
  static constexpr int MAX_ROWS = 1;
  struct F {
    float lane[W];
  };

  template <class Op>
  static F each(Op op) {
    F out;
    for (int i = 0; i < W; ++i) out.lane[i] = op(i);
    return out;
  }
  static float widen(Bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }
  static Bf16 narrow(float x) {  // round to nearest even; NaN stays NaN
    if (x != x) return 0x7fc0;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<Bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  static F zero() { return set1(0.0f); }
  static F set1(float x) { return each([&](int) { return x; }); }
  static F load(const float *p) { return each([&](int i) { return p[i]; }); }
  static F load(const Bf16 *p) { return each([&](int i) { return widen(p[i]); }); }
  template <class T>
  static F load_part(const T *p, int64_t n) {
    T lanes[W] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
    return load(lanes);
  }
  static void store(float *p, F x) { std::memcpy(p, x.lane, sizeof x.lane); }
  static void store(Bf16 *p, F x) {
    for (int i = 0; i < W; ++i) p[i] = narrow(x.lane[i]);
  }
  template <class T>
  static void store_part(T *p, F x, int64_t n) {
    T lanes[W];
    store(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
  }
  static F add(F a, F b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
  static F sub(F a, F b) { return each([&](int i) { return a.lane[i] - b.lane[i]; }); }
  static F mul(F a, F b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
  static F div(F a, F b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }
  static F fma(F a, F b, F c) { return add(mul(a, b), c); }
  // A NaN in the second operand is the result.
  static F max(F a, F b) { return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static F min(F a, F b) { return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
  static F round(F x) { return each([&](int i) { return std::nearbyint(x.lane[i]); }); }
  static F power_of_two(F n) {
    return each([&](int i) {
      const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.lane[i] == n.lane[i] ? n.lane[i] : 0) + 127) << 23;
      float out;
      std::memcpy(&out, &bits, 4);
      return out;
    });
  }
  static float sum(F x) { return (x.lane[0] + x.lane[1]) + (x.lane[2] + x.lane[3]); }
  static float largest(F x) {
    float found = x.lane[0];
    for (int i = 1; i < W; ++i) found = x.lane[i] > found ? x.lane[i] : found;
    return found;
  }
  // The sums of four vectors, as four floats.
  static void sum4(F a, F b, F c, F d, float *out) {
    out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
  }
};

}  // namespace
