// Expert selection for up to 64 tokens in a cluster, and tiles of pairs (a token and an expert),
// sorted by expert, then by token.
#pragma once

#include "route_choose.cuh"

constexpr int MOST_EXPERTS = 512, PAIRS = 8, MOST_PAIRS = 64 * 32;

// Shared memory. Blocks send their selections to the first block in the cluster.
struct Chosen {
  static constexpr int WARPS = MOST_EXPERTS / 32;
  u32 tokens[MOST_EXPERTS][2];  // a bit per token with the expert
  int first_tile[MOST_EXPERTS], warp_tiles[WARPS];
  short chosen[MOST_PAIRS];

  // Call with at least MOST_EXPERTS threads, before a block selects.
  __device__ __forceinline__ void clear() {
    if (threadIdx.x < MOST_EXPERTS) tokens[threadIdx.x][0] = tokens[threadIdx.x][1] = 0;
  }
  // Select a token's experts from its logits, with a warp.
  template <int EACH>
  __device__ __forceinline__ void choose_for(const Route &p, const Value *logits, int token,
                                             int lane) {
    Route of_token = p;
    of_token.logits = logits;
    float weight = 0.0f;
    int expert = -1;
    choose<EACH>(of_token, 0, lane, weight, expert);
    expert -= p.first;
    if (p.positions[token] < 0 || !p.has(expert)) weight = 0.0f, expert = -1;
    if (lane < p.top_k) {
      p.weights[token * p.top_k + lane] = weight;
      p.experts[token * p.top_k + lane] = expert;
      put_in_first_block(chosen + token * p.top_k + lane, (short)expert);
      if (expert >= 0) set_in_first_block(&tokens[expert][token >> 5], 1u << (token & 31));
    }
  }
  // Call with all threads in the first block, at least MOST_EXPERTS. A thread has an expert.
  __device__ __forceinline__ void sort(const Route &p) {
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    int count = 0;
    if (thread < p.num_experts) count = __popc(tokens[thread][0]) + __popc(tokens[thread][1]);
    const int num_tiles = (count + PAIRS - 1) / PAIRS;
    int before = num_tiles;  // for earlier experts in this warp
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int other = __shfl_up_sync(~0u, before, offset);
      if (lane >= offset) before += other;
    }
    if (lane == 31 && warp < WARPS) warp_tiles[warp] = before;
    __syncthreads();
    int first = before - num_tiles, all = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      if (i < warp) first += warp_tiles[i];
      all += warp_tiles[i];
    }
    if (thread == 0) p.tiles[0] = all;
    if (thread < MOST_EXPERTS) first_tile[thread] = first;
    for (int i = 0; i < num_tiles; ++i) p.tiles[1 + first + i] = thread;
    for (int i = count; i < num_tiles * PAIRS; ++i) p.pairs[first * PAIRS + i] = -1;
    __syncthreads();
    for (int pair = thread; pair < p.num_tokens * p.top_k; pair += blockDim.x) {
      const int expert = chosen[pair], of = pair / p.top_k;
      if (expert < 0) continue;
      const u32 low = tokens[expert][0], high = tokens[expert][1], below = (1u << (of & 31)) - 1;
      const int rank = of < 32 ? __popc(low & below) : __popc(low) + __popc(high & below);
      p.pairs[first_tile[expert] * PAIRS + rank] = (short)pair;
    }
  }
};
