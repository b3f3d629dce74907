// A warp's walk over pair tiles and row tiles of expert weights. A warp has its own ring of copies,
// for weights and x, which continues between units of work.
#pragma once

#include "tiles.cuh"

constexpr int PAIRS = 8;
constexpr int X_ROW = (STEP + X_PADDING) * 2, X_BYTES = PAIRS * X_ROW;

template <int F> constexpr int stage_bytes = step_bytes<F> + X_BYTES;

// The weights of all experts, or the shared expert's weight.
struct Weight {
  const u8 *data;
  int num_row_tiles, num_steps, num_rows;
  float scale;
  int missing;  // groups of 8 columns that x lacks in the last step
  const float *bias;  // [experts, num_rows], or [experts, 2, num_rows] for gate and up, or null
};

struct Experts {
  Weight own, shared;  // shared.data: null without a shared expert
  const u16 *x;  // bf16, by token or by pair
  const u16 *shared_x;   // bf16 [B, shared_x_stride]
  void *out, *shared_out;
  const int *tiles;  // [1 + N]: tile count, then each tile's expert
  const short *pairs;  // [N, 8], padded with -1
  const float *weights;  // [B, K], for a sum
  const Value *given;  // [B, given_stride]: the shared expert's result from a different kernel
  const Value *gate;  // [B, gate_stride], the shared expert's gate in a sum, or null
  int num_tokens, top_k, reciprocal;  // 65536 / K, rounded up
  int most_tiles, x_stride, x_each, out_stride, out_each;  // each: stride between a token's pairs
  int shared_x_stride, shared_out_stride, given_stride, gate_stride, residual, epilogue;
  float limit, alpha;  // of a clamped SwiGLU; limit 0: plain

  // Return the offset of a pair's row. Exact below 2,048 pairs.
  __device__ __forceinline__ size_t row_of(int pair, int stride, int each) const {
    const int token = pair * reciprocal >> 16;
    return (size_t)token * stride + (pair - token * top_k) * each;
  }
  __device__ __forceinline__ int num_shared_tiles() const {
    return shared.data ? (num_tokens + PAIRS - 1) / PAIRS : 0;
  }
};

// A work unit: 16 weight rows for a tile's expert, or for the shared expert and eight tokens.
struct Place {
  int tile, row_tile;
  bool is_shared;
};

// The tiles in shared memory, pairs first. A sum reads them before its wait: the router that writes
// them ends before the preceding matmul releases the sum.
struct Table {
  const Experts &p;
  short *pairs;
  int *tiles;
  __device__ __forceinline__ Table(u8 *memory, const Experts &p)
      : p(p), pairs((short *)memory), tiles((int *)(memory + p.most_tiles * PAIRS * 2)) {}
  // Read the maximum tile count, without a wait for their count.
  __device__ __forceinline__ void read() {
    for (int i = threadIdx.x; i <= p.most_tiles; i += blockDim.x) {
      const int tile = (int)read_past4(p.tiles + i);
      if (i) ((uint4 *)pairs)[i - 1] = read_past16((const uint4 *)p.pairs + i - 1);
      tiles[i] = i ? tile : min(tile, p.most_tiles);
    }
  }
  __device__ __forceinline__ int num_tiles() const { return tiles[0]; }
  __device__ __forceinline__ int expert(int tile) const { return tiles[1 + tile]; }
  // Return a pair, or a token of the shared expert. Negative: none.
  __device__ __forceinline__ int member(Place at, int i) const {
    if (!at.is_shared) return pairs[at.tile * PAIRS + i];
    const int token = at.tile * PAIRS + i;
    return token < p.num_tokens ? token : -1;
  }
  __device__ __forceinline__ const Weight &weight(Place at) const {
    return at.is_shared ? p.shared : p.own;
  }
  // Return the biases for rows g and g + 8 of a unit, or for a gate and its up.
  __device__ __forceinline__ float2 biases(Place at, int g) const {
    const Weight &of = weight(at);
    float2 found = make_float2(0.0f, 0.0f);
    if (!of.bias) return found;
    const bool is_paired = p.epilogue == SWIGLU;
    const int row = at.row_tile * (is_paired ? 8 : 16) + g, more = is_paired ? of.num_rows : 8;
    const int each = is_paired ? 2 * of.num_rows : of.num_rows;
    const float *bias = of.bias + (size_t)(at.is_shared ? 0 : expert(at.tile)) * each + row;
    if (row < of.num_rows) found.x = bias[0];
    if (row + (is_paired ? 0 : 8) < of.num_rows) found.y = bias[more];
    return found;
  }
};

// Store a unit's sums: in memory, as float32 or after SwiGLU; or in shared memory, as a sum's
// products [pairs, then tokens of the shared expert; 16].
__device__ __forceinline__ void store_product(const Table &table, Place at, int g, int t,
                                              const float (&acc)[4], float2 bias) {
  const Experts &p = table.p;
  const Weight &of = table.weight(at);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int member = table.member(at, 2 * t + i);
    if (member < 0) continue;
    const float top = acc[i] * of.scale + bias.x, low = acc[2 + i] * of.scale + bias.y;
    void *out = at.is_shared ? p.shared_out : p.out;
    const size_t row = at.is_shared ? (size_t)member * p.shared_out_stride
                                    : p.row_of(member, p.out_stride, p.out_each);
    if (p.epilogue == SWIGLU) {
      const int place = at.row_tile * 8 + g;
      const float value = swiglu(p, top, low);
      if (place < of.num_rows) ((u16 *)out)[row + place] = (u16)pack2(value, 0.0f);
    } else {
      const int place = at.row_tile * 16 + g;
      if (place < of.num_rows) ((float *)out)[row + place] = top;
      if (place + 8 < of.num_rows) ((float *)out)[row + place + 8] = low;
    }
  }
}
__device__ __forceinline__ void keep_product(const Table &table, Place at, float *products,
                                             int num_pairs, int g, int t, const float (&acc)[4],
                                             float2 bias) {
  const Weight &of = table.weight(at);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int member = table.member(at, 2 * t + i);
    if (member < 0) continue;
    float *to = products + (member + (at.is_shared ? num_pairs : 0)) * 16 + g;
    to[0] = acc[i] * of.scale + bias.x;
    to[8] = acc[2 + i] * of.scale + bias.y;
  }
}

// Process a warp's units `first`, `first` + `stride`, ... `where` returns the place of a unit.
// `wait` runs once, after the first weight loads and before x is read. `finish` receives the sums
// of a unit, and biases.
template <int F, int DEPTH, class Where, class Wait, class Finish>
__device__ __forceinline__ void walk(const Table &table, u32 ring, int first, int stride,
                                     int num_units, Where where, Wait wait, Finish finish) {
  constexpr int STAGE = stage_bytes<F>;
  const Experts &p = table.p;
  const int lane = threadIdx.x & 31;
  Source<F> weights(p.own.data, p.own.num_steps, 0, 0, lane);
  const u32 to = ring + weights.to, to4 = ring + weights.to4;
  int weight_unit = first, weight_left = 0;
  auto fetch_weights = [&](int slot) {
    if (weight_unit >= num_units) return;
    if (weight_left == 0) {
      const Place at = where(weight_unit);
      const Weight &of = table.weight(at);
      const int rows_before = at.is_shared ? 0 : table.expert(at.tile) * of.num_row_tiles;
      const Source<F> unit(of.data, of.num_steps, rows_before + at.row_tile, 0, lane);
      weights.a = unit.a, weights.b = unit.b;
#ifdef GENERATED  // gates precede ups, not alternately in eights
      const size_t row = (size_t)of.num_steps * (STEP * 2);
      if (p.epilogue == SWIGLU)
        weights.a -= at.row_tile * 8 * row, weights.b = weights.a + of.num_rows * row;
#endif
      weight_left = of.num_steps;
    }
    weights.fetch(to + slot * STAGE, to4 + slot * STAGE);
    if (--weight_left == 0) weight_unit += stride;
  };
  // Sixteen lanes copy a row.
  const u16 *x[PAIRS / 2];
  const u32 x_to = ring + step_bytes<F> + (lane >> 4) * X_ROW + (lane & 15) * 16;
  int x_unit = first, x_left = 0, x_end = 16;
  auto fetch_x = [&](int slot) {
    if (x_unit >= num_units) return;
    if (x_left == 0) {
      const Place at = where(x_unit);
#pragma unroll
      for (int i = 0; i < PAIRS / 2; ++i) {
        const int member = table.member(at, 2 * i + (lane >> 4));
        x[i] = at.is_shared ? p.shared_x + (size_t)member * p.shared_x_stride
                            : p.x + p.row_of(member, p.x_stride, p.x_each);
        x[i] = member < 0 ? nullptr : x[i] + (lane & 15) * 8;
      }
      x_left = table.weight(at).num_steps;
      x_end = 16 - table.weight(at).missing;
    }
#pragma unroll
    for (int i = 0; i < PAIRS / 2; ++i)
      if (x[i]) {
        copy16_or_zero(x_to + slot * STAGE + i * 2 * X_ROW, x[i],
                       x_left > 1 || (lane & 15) < x_end);
        x[i] += STEP;
      }
    if (--x_left == 0) x_unit += stride;
  };
#pragma unroll
  for (int slot = 0; slot < DEPTH; ++slot) fetch_weights(slot);
  wait();
#pragma unroll
  for (int slot = 0; slot < DEPTH; ++slot) {
    fetch_x(slot);
    commit();
  }
  const u32 from = ring + weight_offset<F>(lane), from4 = F == BF16 ? from ^ 32 : to4;
  const u32 x_from = ring + step_bytes<F> + x_offset<F>(lane, X_ROW);
  int slot = 0;
  for (int unit = first; unit < num_units; unit += stride) {
    const Place at = where(unit);
    const int num_steps = table.weight(at).num_steps;
    const float2 bias = table.biases(at, lane >> 2);
    float acc[1][1][4] = {};
    for (int step = 0; step < num_steps; ++step) {
      wait_copies<DEPTH - 1>();
      __syncwarp();  // lanes read data copied by their peers
      const u32 place = slot * STAGE;
      multiply_tiles<F, 1, 1>(acc, from + place, from4 + place, x_from + place, 0);
      __syncwarp();
      fetch_weights(slot);
      fetch_x(slot);
      commit();
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    finish(at, acc[0][0], bias);
  }
}
