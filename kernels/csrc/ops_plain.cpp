#include "simd_plain.h"

#include "ops_linear.h"

const PhasorOps phasor_ops_plain = {attention, linear_prepare, linear, rotary};
