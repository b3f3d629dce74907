// Expert selection for up to 64 tokens. Pairs (a token and an expert) are sorted by expert, then by
// token, in tiles with up to 8 pairs for an expert. Compiled by NVRTC.
//
// Legend: B tokens, E experts, K experts for a token, pair b K + k, N tiles in use at most.

#include "route_sort.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;  // per block: a warp per token, a thread per expert

// Route a token with a warp.
template <int EACH> __device__ __forceinline__ void route_one(const Route &p) {
  release_dependents();
  wait_for_inputs();
  choose_one<EACH, false, true>(p, threadIdx.x, p.weights, p.experts, p.tiles, p.pairs);
}

// Route tokens with a cluster of blocks. The first block sorts all pairs.
template <int EACH> __device__ __forceinline__ void route(const Route &p) {
  __shared__ Chosen shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  shared.clear();
  release_dependents();
  if (gridDim.x > 1) cluster_barrier();
  else __syncthreads();
  wait_for_inputs();
  const int token = blockIdx.x * WARPS + warp;
  if (token < p.num_tokens)
    shared.choose_for<EACH>(p, p.logits + (size_t)token * p.logits_stride, token, lane);
  if (gridDim.x > 1) cluster_barrier();
  else __syncthreads();
  if (blockIdx.x == 0) shared.sort(p);
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
