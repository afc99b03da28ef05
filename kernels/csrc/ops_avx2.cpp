#include "simd_avx2.h"

#include "ops_linear.h"

const PhasorOps phasor_ops_avx2 = {attention, linear_prepare, linear, rotary};
