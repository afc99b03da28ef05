// The exported functions: which instruction set computes, and the memory that a call needs.

#include <cstdlib>

#include "phasor_kernels.h"

#if defined(PHASOR_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PHASOR_EXPORT extern "C" __attribute__((visibility("default")))

#ifndef PHASOR_SOURCE_DIGEST
#define PHASOR_SOURCE_DIGEST "unknown"
#endif

namespace {

enum Isa : int32_t { PLAIN = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX = 4 };

const PhasorOps &ops_of(int32_t isa) {
#if defined(PHASOR_X86)
  switch (isa) {
    case AVX2: return phasor_ops_avx2;
    case AVX512: return phasor_ops_avx512;
    case AVX512_BF16: return phasor_ops_avx512_bf16;
#if defined(PHASOR_AMX)
    case AMX: return phasor_ops_amx;
#endif
    default: break;
  }
#endif
  (void)isa;
  return phasor_ops_plain;
}

#if defined(PHASOR_AMX)
// Linux saves the matrix unit's registers only for a process that has asked for it.
bool has_amx() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  constexpr unsigned AMX_BF16_BIT = 1u << 22, AMX_TILE_BIT = 1u << 24;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & (AMX_BF16_BIT | AMX_TILE_BIT)) != (AMX_BF16_BIT | AMX_TILE_BIT)) return false;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

}  // namespace

PHASOR_EXPORT const char *phasor_source_digest() { return "phasor-source-digest:" PHASOR_SOURCE_DIGEST; }

PHASOR_EXPORT int32_t phasor_abi_version() { return PHASOR_ABI_VERSION; }

// The best instruction set that this processor and its operating system offer.
PHASOR_EXPORT int32_t phasor_best_isa() {
#if defined(PHASOR_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    if (!__builtin_cpu_supports("avx512bf16")) return AVX512;
#if defined(PHASOR_AMX)
    if (has_amx()) return AMX;
#endif
    return AVX512_BF16;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
  return PLAIN;
}

PHASOR_EXPORT void phasor_attention(const PhasorAttention *a, int32_t isa) {
  ops_of(isa).attention(a, 0, a->num_sequences * a->num_kv_heads);
}

PHASOR_EXPORT void phasor_rotary(const PhasorRotary *a, int32_t isa) { ops_of(isa).rotary(a); }

// Returns 0, or 1 when there is no memory for the prepared rows.
PHASOR_EXPORT int32_t phasor_linear(const PhasorLinear *a, int32_t isa) {
  if (a->num_rows == 0) return 0;
  const int64_t padded = (a->num_inputs + PHASOR_ROW_PADDING - 1) / PHASOR_ROW_PADDING * PHASOR_ROW_PADDING;
  void *scratch = nullptr;
  // Rows in float32, or in bfloat16 twice, once for tiles of 16.
  const int64_t rows = (a->num_rows + 15) / 16 * 16;
  if (posix_memalign(&scratch, 64, static_cast<size_t>(rows * padded) * sizeof(float))) return 1;
  ops_of(isa).linear_prepare(a, scratch);
  ops_of(isa).linear(a, scratch, 0, (a->num_outputs + PHASOR_LINEAR_BLOCK - 1) / PHASOR_LINEAR_BLOCK);
  free(scratch);
  return 0;
}
