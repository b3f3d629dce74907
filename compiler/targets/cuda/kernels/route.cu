// The experts of up to 64 tokens, and the pairs of a token and its expert in tiles of up to 8 pairs
// of one expert, those of several tokens sorted by expert and by token. Compiled by NVRTC.
//
// Legend: B tokens, E experts, K experts of a token, pair b K + k, N tiles in use at most.

#include "route_choose.cuh"

constexpr int MOST_EXPERTS = 512, PAIRS = 8, MOST_PAIRS = 64 * 32;
constexpr int WARPS = 16, THREADS = WARPS * 32;  // of a block: a warp a token, a thread an expert

// One token, of one warp.
template <int EACH> __device__ __forceinline__ void route_one(const Route &p) {
  release_dependents();
  wait_for_inputs();
  choose_one<EACH, false, true>(p, threadIdx.x, p.weights, p.experts, p.tiles, p.pairs);
}

// A cluster of blocks, each for some tokens; the first of them then sorts all pairs.
template <int EACH> __device__ __forceinline__ void route(const Route &p) {
  __shared__ u32 tokens[MOST_EXPERTS][2];  // a bit for each token that has the expert
  __shared__ int first_tile[MOST_EXPERTS], warp_tiles[WARPS];
  __shared__ short chosen[MOST_PAIRS];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  tokens[thread][0] = tokens[thread][1] = 0;
  release_dependents();
  if (gridDim.x > 1) cluster_barrier();
  else __syncthreads();
  wait_for_inputs();
  const int token = blockIdx.x * WARPS + warp;
  if (token < p.num_tokens) {
    float weight = 0.0f;
    int expert = -1;
    choose<EACH>(p, token, lane, weight, expert);
    expert -= p.first;
    if (p.positions[token] < 0 || !p.has(expert)) weight = 0.0f, expert = -1;
    if (lane < p.top_k) {
      p.weights[token * p.top_k + lane] = weight;
      p.experts[token * p.top_k + lane] = expert;
      put_in_first_block(chosen + token * p.top_k + lane, (short)expert);
      if (expert >= 0) set_in_first_block(&tokens[expert][token >> 5], 1u << (token & 31));
    }
  }
  if (gridDim.x > 1) cluster_barrier();
  else __syncthreads();
  if (blockIdx.x > 0) return;
  int count = 0;
  if (thread < p.num_experts) count = __popc(tokens[thread][0]) + __popc(tokens[thread][1]);
  const int num_tiles = (count + PAIRS - 1) / PAIRS;
  int before = num_tiles;  // of this warp's experts, up to this one
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int other = __shfl_up_sync(~0u, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == 31) warp_tiles[warp] = before;
  __syncthreads();
  int first = before - num_tiles, all = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i < warp) first += warp_tiles[i];
    all += warp_tiles[i];
  }
  if (thread == 0) p.tiles[0] = all;
  first_tile[thread] = first;
  for (int i = 0; i < num_tiles; ++i) p.tiles[1 + first + i] = thread;
  for (int i = count; i < num_tiles * PAIRS; ++i) p.pairs[first * PAIRS + i] = -1;
  __syncthreads();
  for (int pair = thread; pair < p.num_tokens * p.top_k; pair += THREADS) {
    const int expert = chosen[pair], of = pair / p.top_k;
    if (expert < 0) continue;
    const u32 low = tokens[expert][0], high = tokens[expert][1], below = (1u << (of & 31)) - 1;
    const int rank = of < 32 ? __popc(low & below) : __popc(low) + __popc(high & below);
    p.pairs[first_tile[expert] * PAIRS + rank] = (short)pair;
  }
}

#define ROUTE(EACH)                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) route_##EACH(const Route p) {          \
    route<EACH>(p);                                                                               \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(32) route_one_##EACH(const Route p) {              \
    route_one<EACH>(p);                                                                           \
  }

ROUTE(4)
ROUTE(8)
ROUTE(16)
