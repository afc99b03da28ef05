// AVX-512 with bfloat16 linears on the matrix unit (AMX): from a few rows on, dot products cost more than reading the
// weights does, and the matrix unit's do not.

#include "simd_avx512.h"

#include "ops_linear.h"

namespace {

constexpr int64_t TILE = 16;       // rows of a tile; SEGMENT outputs of one stream are one tile
constexpr int64_t TILE_INPUTS = 32;
constexpr int64_t MIN_ROWS = 5;    // with fewer, dot products keep up with the weights that they wait for
static_assert(SEGMENT == TILE, "a segment is a tile");

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

bool suits(const PhasorLinear &a) {
  return a.type == PHASOR_BF16 && a.num_inputs % TILE_INPUTS == 0 && stream_length(a) >= TILE &&
         a.num_rows >= MIN_ROWS && a.num_rows <= 2 * TILE;
}

int64_t num_row_tiles(const PhasorLinear &a) { return (a.num_rows + TILE - 1) / TILE; }

// scratch: for each tile of 16 rows of x, for each 32 inputs, 16 pairs of inputs by 16 rows; zeros where no row is.
// Behind it the rows as `prepare_of` makes them.
void pack(const PhasorLinear &a, void *scratch) {
  const int64_t padded = padded_inputs(a), pairs = a.num_inputs / 2, tiles = num_row_tiles(a);
  uint32_t *to = static_cast<uint32_t *>(scratch);
  Bf16 *rows = static_cast<Bf16 *>(scratch) + tiles * TILE * padded;
  prepare_of<Bf16>(a, rows);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t m = 0; m < TILE; ++m) {
      const int64_t row = tile * TILE + m;
      uint32_t *column = to + tile * pairs * TILE + m;
      if (row >= a.num_rows) {
        for (int64_t p = 0; p < pairs; ++p) column[p * TILE] = 0;
        continue;
      }
      const Bf16 *x = rows + row * padded;
      for (int64_t p = 0; p < pairs; ++p) std::memcpy(column + p * TILE, x + 2 * p, 4);
    }
  }
}

// sums[g][m][16] for ROW_TILES tiles of rows against the quad's GROUPS first tiles of outputs. Meanwhile brings the
// weights of `ahead` into the second level cache, in order.
template <int ROW_TILES, int GROUPS>
inline void multiply(const Bf16 *const *weight, const Bf16 *const *ahead, const uint32_t *packed, int64_t count,
                     float *sums) {
  const int64_t stride = count * 2, steps = count / TILE_INPUTS, row_tile = count / 2 * TILE;
  static_assert(ROW_TILES * GROUPS == 4, "four tiles of sums");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; ++k) {
    for (int g = 0; g < GROUPS; ++g) {
      const char *next = reinterpret_cast<const char *>(ahead[g]) + k * TILE * 64;
      for (int line = 0; line < TILE; ++line) __builtin_prefetch(next + line * 64, 0, 2);
    }
    const int64_t i = k * TILE_INPUTS;
    if constexpr (ROW_TILES == 1) {
      _tile_loadd(6, packed + k * TILE * TILE, 64);
      _tile_loadd(4, weight[0] + i, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, weight[1] + i, stride);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, weight[2] + i, stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, weight[3] + i, stride);
      _tile_dpbf16ps(3, 5, 6);
    } else {
      _tile_loadd(6, packed + k * TILE * TILE, 64);
      _tile_loadd(7, packed + row_tile + k * TILE * TILE, 64);
      _tile_loadd(4, weight[0] + i, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, weight[1] + i, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + TILE * TILE, 64);
  _tile_stored(2, sums + 2 * TILE * TILE, 64);
  _tile_stored(3, sums + 3 * TILE * TILE, 64);
}

// Puts [16 outputs, 16 rows] tiles as [rows, 16 outputs] into the block that `finish` reads.
inline void transpose(const float *sums, int64_t num_rows, float *to) {
  const __m512i index = _mm512_mullo_epi32(
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(TILE));
  for (int64_t m = 0; m < num_rows; ++m)
    _mm512_storeu_ps(to + m * PHASOR_LINEAR_BLOCK, _mm512_i32gather_ps(index, sums + m, 4));
}

// One item: all streams' segments, GROUPS at a time; gate and up where gated.
template <int ROW_TILES>
void linear_amx(const PhasorLinear &a, const uint32_t *packed, int64_t first, int64_t last) {
  constexpr int GROUPS = 4 / ROW_TILES;
  const Bf16 *weights = static_cast<const Bf16 *>(a.weight);
  const int64_t length = stream_length(a), parts = a.gated ? 2 : 1, quads = STREAMS / GROUPS;
  // The last segments overlap the ones before them rather than reach past the end.
  auto output_of = [&](int64_t item, int64_t stream) {
    const int64_t at = item * TILE < length - TILE ? item * TILE : length - TILE;
    const int64_t n = stream * length + at;
    return n < a.num_outputs - TILE ? n : a.num_outputs - TILE;
  };
  const int64_t per_item = parts * quads;
  auto fill = [&](int64_t turn, const Bf16 **to) {  // what is read in the turn-th place
    const int64_t item = turn / per_item, part = turn / quads % parts, quad = turn % quads;
    for (int g = 0; g < GROUPS; ++g)
      to[g] = weights + (part * a.num_outputs + output_of(item, quad * GROUPS + g)) * a.num_inputs;
  };
  float *block = static_cast<float *>(std::malloc(2 * static_cast<size_t>(a.num_rows * PHASOR_LINEAR_BLOCK) * sizeof(float)));
  alignas(64) float sums[4 * TILE * TILE];
  const Bf16 *now[4], *ahead[4];
  fill(first * per_item, ahead);
  for (int64_t item = first; item < last; ++item) {
    float *ups = block + a.num_rows * PHASOR_LINEAR_BLOCK;
    for (int64_t turn = item * per_item; turn < (item + 1) * per_item; ++turn) {
      for (int g = 0; g < GROUPS; ++g) now[g] = ahead[g];
      if (turn + 1 < last * per_item) fill(turn + 1, ahead);
      multiply<ROW_TILES, GROUPS>(now, ahead, packed, a.num_inputs, sums);
      float *to = (turn / quads % parts ? ups : block) + turn % quads * GROUPS * SEGMENT;
      for (int g = 0; g < GROUPS; ++g)
        for (int r = 0; r < ROW_TILES; ++r) {
          const int64_t left = a.num_rows - r * TILE;
          transpose(sums + (g * ROW_TILES + r) * TILE * TILE, left < TILE ? left : TILE,
                    to + g * SEGMENT + r * TILE * PHASOR_LINEAR_BLOCK);
        }
    }
    for (int64_t s = 0; s < STREAMS; ++s) {
      if (a.out_type == PHASOR_F32)
        finish<Bf16, float>(a, block + s * SEGMENT, ups + s * SEGMENT, output_of(item, s), TILE);
      else
        finish<Bf16, Bf16>(a, block + s * SEGMENT, ups + s * SEGMENT, output_of(item, s), TILE);
    }
  }
  std::free(block);
}

void prepare_or_pack(const PhasorLinear *a, void *scratch) {
  if (suits(*a))
    pack(*a, scratch);
  else
    linear_prepare(a, scratch);
}

void linear_or_amx(const PhasorLinear *a, const void *scratch, int64_t first, int64_t last) {
  if (!suits(*a)) return linear(a, scratch, first, last);
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = TILE, config.row_bytes[tile] = 64;
  _tile_loadconfig(&config);
  if (num_row_tiles(*a) == 1)
    linear_amx<1>(*a, static_cast<const uint32_t *>(scratch), first, last);
  else
    linear_amx<2>(*a, static_cast<const uint32_t *>(scratch), first, last);
  _tile_release();
}

}  // namespace

const PhasorOps phasor_ops_amx = {attention, prepare_or_pack, linear_or_amx, rotary};
