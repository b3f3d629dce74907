// Matmul of 1 to 16 tokens: x is in shared memory, and weights stream through it.
#pragma once

#include "norm.cuh"

// Steps of 4-bit codes run in pairs for a single token: they take longer than their bytes.
template <int F, int MT> constexpr bool is_paired = MT == 0 && pieces<F> == 2;

// The eight warps of a block process row tiles: the same tile in slices of K, or separate tiles.
// MT * 8 tokens with a split K. MT = 0: a single token, with the x row in all eight token columns.
// LEAVES: the first block also stores the norm in `normed`. This is a separate kernel because code
// for a single run takes longer to fetch than to execute.
template <int F, int MT, int DEPTH, bool LEAVES = false>
__device__ __forceinline__ void gemv(const Product &p, u16 *normed = nullptr) {
  constexpr int GROUPS = MT ? MT : 1, TOKENS = MT ? MT * 8 : 1;
  // Steps in a slot of the ring, with a single wait and a single advance.
  constexpr int TOGETHER = is_paired<F, MT> ? 2 : 1, SLOTS = DEPTH / TOGETHER;
  constexpr u32 SLOT_BYTES = TOGETHER * step_bytes<F>;
  static_assert(DEPTH % TOGETHER == 0, "the ring has whole slots");
  constexpr int UNROLLED = DEPTH > 6 || TOGETHER > 1 ? 1 : SLOTS;  // long code takes long to fetch
  extern __shared__ __align__(128) u8 memory[];
  __shared__ float sums[2][SLICES][TOKENS][16];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool is_cut = MT || p.num_slices > 1;
  const int first = is_cut ? warp * p.num_steps / SLICES : 0;
  const int last = is_cut ? (warp + 1) * p.num_steps / SLICES : p.num_steps;
  const int first_tile = blockIdx.x + (is_cut ? 0 : gridDim.x * warp);
  const int tile_stride = gridDim.x * (is_cut ? 1 : 8);
  u16 *x = (u16 *)memory;
  const int padded = p.num_steps * STEP;
  const int x_row = MT ? (padded + x_padding<F>) * 2 : 0;
  const u32 ring = shared_address(memory) + (MT ? TOKENS * x_row : padded * 2) +
                   warp * DEPTH * step_bytes<F>;
  const int num_steps = last - first;
  Source<F> source(p.weight, p.num_steps, first_tile, first, lane);
  const u32 to = ring + source.to, to4 = ring + source.to4;
  const u32 run = num_steps * Source<F>::ADVANCE;  // advance of `a` within a tile
  const long long jump = (long long)tile_stride * p.num_steps * tile_bytes<F> - run;
  u32 end = low_bits(source.a) + run;
  int next_tile = num_steps ? first_tile : p.num_tiles;
  auto fetch = [&](int slot) {
    if (next_tile < p.num_tiles) {
      const u32 place = to + slot * SLOT_BYTES, place4 = to4 + slot * SLOT_BYTES;
      const bool is_whole = TOGETHER == 2 && low_bits(source.a) + Source<F>::ADVANCE != end;
      source.template copy<true>(place, place4, 0);
      if (is_whole)
        source.template copy<true>(place + step_bytes<F>, place4 + step_bytes<F>,
                                   Source<F>::ADVANCE);
      source.skip(is_whole ? 2 * Source<F>::ADVANCE : Source<F>::ADVANCE);
      if (__builtin_expect(low_bits(source.a) == end, 0)) {
        next_tile += tile_stride;
        source.skip(jump);
        end = low_bits(source.a) + run;
      }
    }
    commit();
  };
  release_beside(p);
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) fetch(slot);
  if (p.norm) {
    const float *from = (const float *)p.x;
    if constexpr (LEAVES) {
      u16 *left = blockIdx.x == 0 ? normed : nullptr;
      normalise_by(from, p.norm, p.num_columns, padded, p.eps, [=](int at, uint2 four) {
        *(uint2 *)(x + at) = four;
        if (left) *(uint2 *)(left + at) = four;
      });
    } else {
      normalise(from, p.norm, p.num_columns, padded, p.eps, x);
    }
  } else if (MT == 0) {
    constexpr int EACH = 256 * 8, AT_ONCE = 8;  // 16,384 columns with a single wait for memory
    wait_for_inputs();
    for (int first = threadIdx.x * 8; first < padded; first += AT_ONCE * EACH) {
      uint4 read[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (first + i * EACH < padded)
          read[i] = *(const uint4 *)((const u16 *)p.x + first + i * EACH);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (first + i * EACH < padded) *(uint4 *)(x + first + i * EACH) = read[i];
    }
  } else {
    wait_for_inputs();
    for (int token = 0; token < p.num_tokens; ++token)
      for (int at = threadIdx.x * 8; at < padded; at += 256 * 8)
        copy16(shared_address(memory) + token * x_row + at * 2,
               (const u16 *)p.x + (size_t)token * p.x_stride + at);
    commit();
    wait_copies<0>();
  }
  __syncthreads();
  const u32 from = ring + weight_offset<F>(lane), from4 = ring + second_offset<F>(lane);
  const u32 x_first = shared_address(memory) + x_offset<F>(lane, x_row) + first * (STEP * 2);
  const u32 x_last = x_first + num_steps * (STEP * 2);
  u32 at = x_first;
  int tile = first_tile, turn = 0;
  float acc[1][GROUPS][4] = {};
  float2 old[MT ? 2 * MT : 1];  // addends for the tile
  auto read_addends = [&] {
    if (is_cut && warp != (turn & 7)) return;
    if (MT) {
#pragma unroll
      for (int i = 0; i < 2 * MT; ++i)
        old[i] = addends_of(p, (lane >> 3) + 4 * i, tile, lane & 7);
    } else {
      old[0] = addends_of(p, 0, tile, is_cut ? lane & 7 : lane >> 2);
    }
  };
  // Separate from `finish_some`: the code for a single token must remain short.
  auto finish_one = [&] {
    if (!is_cut) {
      if ((lane & 3) == 0)
        finish<F, true>(p, 0, tile, lane >> 2, acc[0][0][0], acc[0][0][2], old[0]);
      return;
    }
    float(*partial)[TOKENS][16] = sums[turn & 1];
    if ((lane & 3) == 0) {
      partial[warp][0][lane >> 2] = acc[0][0][0];
      partial[warp][0][8 + (lane >> 2)] = acc[0][0][2];
    }
    __syncthreads();  // the other buffer is free: its reader has passed this barrier
    if (warp == (turn & 7) && lane < 8) {
      float top = partial[0][0][lane], low = partial[0][0][lane + 8];
#pragma unroll
      for (int slice = 1; slice < SLICES; ++slice) {
        top += partial[slice][0][lane];
        low += partial[slice][0][lane + 8];
      }
      finish<F, true>(p, 0, tile, lane, top, low, old[0]);
    }
  };
  auto finish_some = [&] {
    const int g = lane >> 2, t = lane & 3;
    float(*partial)[TOKENS][16] = sums[turn & 1];
#pragma unroll
    for (int m = 0; m < GROUPS; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        partial[warp][m * 8 + 2 * t + (i & 1)][g + (i >> 1) * 8] = acc[0][m][i];
    __syncthreads();
    if (warp == (turn & 7))
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; ++i) {
        const int token = (lane >> 3) + 4 * i, row = lane & 7;
        if (token >= p.num_tokens) break;
        float top = partial[0][token][row], low = partial[0][token][row + 8];
#pragma unroll
        for (int slice = 1; slice < SLICES; ++slice) {
          top += partial[slice][token][row];
          low += partial[slice][token][row + 8];
        }
        finish<F, true>(p, token, tile, row, top, low, old[MT ? i : 0]);
      }
  };
  auto finish_tile = [&] {
    if (MT) finish_some();
    else finish_one();
#pragma unroll
    for (int m = 0; m < GROUPS; ++m)
      acc[0][m][0] = acc[0][m][1] = acc[0][m][2] = acc[0][m][3] = 0.0f;
    at = x_first;
    tile += tile_stride;
    ++turn;
    read_addends();
  };
  read_addends();
  if (num_steps == 0) {
    while (tile < p.num_tiles) finish_tile();
    return;
  }
  while (tile < p.num_tiles) {
#pragma unroll UNROLLED
    for (int slot = 0; slot < SLOTS; ++slot) {
      wait_copies<SLOTS - 1>();
      if (is_exchanged<F>) __syncwarp();  // lanes read the copies of other lanes
      const u32 place = from + slot * SLOT_BYTES, place4 = from4 + slot * SLOT_BYTES;
      multiply_tiles<F, GROUPS, 1, is_paired<F, MT>>(acc, place, place4, at, 8 * x_row);
      at += STEP * 2;
      if (TOGETHER == 2 && at != x_last) {
        multiply_tiles<F, GROUPS, 1, true>(acc, place + step_bytes<F>, place4 + step_bytes<F>, at,
                                           8 * x_row);
        at += STEP * 2;
      }
      if (is_exchanged<F>) __syncwarp();
      fetch(slot);
      if (__builtin_expect(at == x_last, 0)) {
        finish_tile();
        if (tile >= p.num_tiles) break;
      }
    }
  }
}

#define GEMV(name, F, MT, DEPTH)                                                                  \
  extern "C" __global__ void __launch_bounds__(256, MT || is_paired<F, MT> ? 2 : 3)               \
  gemv_##name##_##MT##_##DEPTH(const Product p) { gemv<F, MT, DEPTH>(p); }
