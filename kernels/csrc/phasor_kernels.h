// The C interface of Phasor's CPU kernels, and the table that each instruction set fills.
//
// Letters: T tokens (rows) of the step, S sequences, H query heads, G KV heads, D key dim, E value dim,
// B block_tokens, R rotary dim, K inputs and N outputs of a linear. Strides are in elements. Nothing is kept
// between calls and nothing is allocated that outlives one.
#pragma once

#include <cstdint>

// Counts up whenever a structure or function below changes; the caller compares it with its own.
constexpr int32_t PHASOR_ABI_VERSION = 1;

extern "C" {

// Element types of activations, weights and pages.
enum PhasorType : int32_t { PHASOR_F32 = 0, PHASOR_BF16 = 1 };

// One query token per sequence against its pages. Rows at and after a sequence's length are never read.
struct PhasorAttention {
  const void *query;       // row s at query_rows[s] * query_stride: [H, D] contiguous
  const void *k_pages;     // [num_blocks, G, B, D], strided
  const void *v_pages;     // [num_blocks, G, B, E], strided
  void *out;               // row s at query_rows[s] * out_stride: [H, E] contiguous
  const int64_t *rows;     // [S] rows of query and out
  const int64_t *tables;   // [S, table_stride] block ids
  const int64_t *lengths;  // [S] tokens to attend to, at least 1
  int64_t num_sequences, table_stride, query_stride, out_stride;
  int64_t k_block_stride, k_head_stride, k_token_stride;
  int64_t v_block_stride, v_head_stride, v_token_stride;
  int64_t num_heads, num_kv_heads, k_dim, v_dim, block_tokens;
  float scale;
  int32_t type;
};

// out = post(pre(x) @ weight^T), row by row: a row's result does not depend on how many rows there are.
struct PhasorLinear {
  const void *x;          // [T, K], rows x_stride apart
  const void *weight;     // [N, K] contiguous, or [2 N, K] where `gated`
  const void *bias;       // [N] or null (not where `gated`)
  const void *norm;       // [K] or null: RMS norm of each row first, times this weight
  const void *residual;   // [T, N] contiguous or null: added to the result
  void *out;              // [T, N] contiguous
  int64_t num_rows, num_inputs, num_outputs, x_stride;
  float norm_eps;
  int32_t gated;          // out = silu(x @ weight[:N]^T) * (x @ weight[N:]^T)
  int32_t type;           // of x, weight, bias, norm, residual
  int32_t out_type;       // of out
};

// Rotate queries and keys (half-split pairing), and put keys and values into their slots.
struct PhasorRotary {
  void *query;                 // rows query_stride apart, [H, D] contiguous; rotated in place
  const void *key;             // rows key_stride apart, [G, D] contiguous
  const void *value;           // rows value_stride apart, [G, E] contiguous
  const void *cos, *sin;       // [T, R] contiguous, or null: nothing is rotated, query may be null
  void *k_pages, *v_pages;     // as above
  const int64_t *slot_blocks, *slot_offsets;  // [T]
  int64_t num_tokens, query_stride, key_stride, value_stride;
  int64_t k_block_stride, k_head_stride, k_token_stride;
  int64_t v_block_stride, v_head_stride, v_token_stride;
  int64_t num_heads, num_kv_heads, k_dim, v_dim, rotary_dim;
  int32_t type;
};
}

// Work items `first` .. `last - 1` of a call. Attention: sequence * G + KV head. Linear: blocks of outputs.
struct PhasorOps {
  void (*attention)(const PhasorAttention *, int64_t first, int64_t last);
  void (*linear_prepare)(const PhasorLinear *, void *scratch);
  void (*linear)(const PhasorLinear *, const void *scratch, int64_t first, int64_t last);
  void (*rotary)(const PhasorRotary *);
};

constexpr int64_t PHASOR_LINEAR_BLOCK = 128;   // outputs per work item
constexpr int64_t PHASOR_ROW_PADDING = 64;     // prepared rows are this many elements longer at most

extern const PhasorOps phasor_ops_plain;
#if defined(__x86_64__) && !defined(PHASOR_PLAIN_ONLY)
#define PHASOR_X86 1
#if defined(__linux__) && !defined(PHASOR_NO_AMX)
#define PHASOR_AMX 1
extern const PhasorOps phasor_ops_amx;
#endif
extern const PhasorOps phasor_ops_avx2, phasor_ops_avx512, phasor_ops_avx512_bf16;
#endif
