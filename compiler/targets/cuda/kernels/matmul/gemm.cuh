// Matmul of up to 64 tokens.
#pragma once

#include "tiles.cuh"

// Multiply up to MT * 8 tokens. A warp has R row tiles. If K is split, a cluster of 8 blocks along
// y divides its slices. Then each block adds the sums for some tokens from all shared memories.
template <int F, int MT, int R, int DEPTH> __device__ __forceinline__ void gemm(const Product &p) {
  extern __shared__ __align__(128) u8 memory[];
  constexpr int X_ROW = (STEP + x_padding<F>) * 2, X_BYTES = MT * 8 * X_ROW;
  constexpr int W_BYTES = R * step_bytes<F>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, num_warps = blockDim.x >> 5;
  const int tile = (blockIdx.x * num_warps + warp) * R, g = lane >> 2, t = lane & 3;
  const int slice = blockIdx.y, num_slices = gridDim.y;
  const int first = slice * p.num_steps / num_slices, last = (slice + 1) * p.num_steps / num_slices;
  const u32 x_ring = shared_address(memory);
  const u32 ring = x_ring + DEPTH * X_BYTES + warp * DEPTH * W_BYTES;
  int num_tiles = p.num_tiles - tile;  // for this warp
  num_tiles = num_tiles < 0 ? 0 : num_tiles > R ? R : num_tiles;
  Source<F> source(p.weight, p.num_steps, num_tiles ? tile : 0, first, lane);
  const u32 to = ring + source.to, to4 = ring + source.to4;
  auto fetch_w = [&](int slot) {
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (r < num_tiles) {
        Source<F> one = source;
        one.skip((long long)r * p.num_steps * tile_bytes<F>);
        const u32 place = slot * W_BYTES + r * step_bytes<F>;
        one.fetch(to + place, to4 + place);
      }
    source.skip(Source<F>::ADVANCE);
  };
  // The first 128 threads copy x, eight tokens at a time.
  const u32 x_stride8 = p.x_stride * 16;
  const u8 *x_from = (const u8 *)p.x + (threadIdx.x >> 4) * (size_t)(p.x_stride * 2) +
                     (threadIdx.x & 15) * 16 + first * (STEP * 2);
  const u32 x_to = x_ring + (threadIdx.x >> 4) * X_ROW + (threadIdx.x & 15) * 16;
  auto fetch_x = [&](int slot) {
    if (threadIdx.x < 128) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
        copy16(x_to + slot * X_BYTES + m * 8 * X_ROW, x_from + (size_t)m * x_stride8);
      x_from += STEP * 2;
    }
  };
  const int num_steps = last - first;
  release_beside(p);
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i)
    if (i < num_steps) fetch_w(i);
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) {
    if (i < num_steps) fetch_x(i);
    commit();
  }
  float acc[R][MT][4] = {};
  const u32 from = ring + weight_offset<F>(lane), from4 = ring + second_offset<F>(lane);
  const u32 x_at = x_ring + x_offset<F>(lane, X_ROW);
  int left = num_steps;
  while (left > 0) {
#pragma unroll
    for (int slot = 0; slot < DEPTH; ++slot) {
      wait_copies<DEPTH - 2>();
      __syncthreads();
      if (left >= DEPTH) {
        fetch_w((slot + DEPTH - 1) % DEPTH);
        fetch_x((slot + DEPTH - 1) % DEPTH);
      }
      commit();
      multiply_tiles<F, MT, R>(acc, from + slot * W_BYTES, from4 + slot * W_BYTES,
                               x_at + slot * X_BYTES, 8 * X_ROW);
      if (--left == 0) break;
    }
  }
  if (num_slices == 1) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (tile + r >= p.num_tiles) continue;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        finish<F>(p, m * 8 + 2 * t, tile + r, g, acc[r][m][0], acc[r][m][2]);
        finish<F>(p, m * 8 + 2 * t + 1, tile + r, g, acc[r][m][1], acc[r][m][3]);
      }
    }
    return;
  }
  const int width = num_warps * R * 16 + 8;  // floats per token; 8 more shift the banks
  float *partial = (float *)memory;
  wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        partial[(m * 8 + 2 * t + (i & 1)) * width + (warp * R + r) * 16 + g + (i >> 1) * 8] =
            acc[r][m][i];
  // Call `run` with pairs of rows in a tile, for tokens of this slice.
  constexpr int EACH = (MT * R * 8 + 31) / 32;
  const int num_pairs = num_warps * R * 8;
  auto each = [&](auto run) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int i = threadIdx.x + j * blockDim.x, pair = i % num_pairs;
      const int token = i / num_pairs * 8 + slice;
      const int owner = blockIdx.x * num_warps * R + (pair >> 3);
      if (token < min(p.num_tokens, MT * 8) && owner < p.num_tiles) run(j, token, owner, pair);
    }
  };
  float2 old[EACH];
  each([&](int j, int token, int owner, int pair) {
    old[j] = addends_of(p, token, owner, pair & 7);
  });
  cluster_barrier();
  each([&](int j, int token, int owner, int pair) {
    const u32 at = shared_address(partial + token * width + (pair >> 3) * 16 + (pair & 7));
    float top[SLICES], low[SLICES];
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      top[s] = read_of_rank(at, s);
      low[s] = read_of_rank(at + 32, s);
    }
#pragma unroll
    for (int s = 1; s < SLICES; ++s) {
      top[0] += top[s];
      low[0] += low[s];
    }
    finish<F, true>(p, token, owner, pair & 7, top[0], low[0], old[j]);
  });
  cluster_arrive();  // another block may still read this block's memory
  cluster_wait();
}

#define GEMM(name, F, MT, R, DEPTH)                                                               \
  extern "C" __global__ void __launch_bounds__(256, MT * R > (is_coded<F> ? 4 : 8) ? 1 : 2)       \
  gemm_##name##_##MT##_##R##_##DEPTH(const Product p) { gemm<F, MT, R, DEPTH>(p); }
