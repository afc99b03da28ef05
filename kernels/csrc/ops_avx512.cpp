#include "simd_avx512.h"

#include "ops_linear.h"

const PhasorOps phasor_ops_avx512 = {attention, linear_prepare, linear, rotary};
