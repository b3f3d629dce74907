// The experts of up to 64 tokens, and the pairs of a token and its expert in tiles of up to 8 pairs
// of one expert, those of several tokens sorted by expert and by token. Compiled by NVRTC.
//
// Legend: B tokens, E experts, K experts of a token, pair b K + k, N tiles in use at most.

#include "primitives.cuh"

constexpr int MOST_EXPERTS = 512, PAIRS = 8;
constexpr int WARPS = 16, THREADS = WARPS * 32;  // of a block: a warp a token, a thread an expert

struct Route {
  const Value *logits;         // [B, logits_stride]
  const long long *positions;  // [B]: negative for padding
  float *weights;              // [B, K]
  int *experts;                // [B, K]: from `first` on; -1 for padding and other ranks'
  int *tiles;                  // [1 + N]: how many there are, then the expert of each
  short *pairs;                // [N, 8]: -1 where a tile has no more
  int num_tokens, num_experts, top_k, logits_stride, renormalise;
  int first, count;            // of the experts that this rank has; others' pairs are as padding's
  __device__ __forceinline__ bool has(int expert) const { return (u32)expert < (u32)count; }
};

// A float as an integer that orders as it does; what is no number comes before all numbers.
__device__ __forceinline__ int order_of(float x) {
  const int bits = __float_as_int(x);
  if (x != x) return -0x7FFFFFFE;
  return bits < 0 ? (bits ^ 0x7FFFFFFF) + 1 : bits;
}
constexpr int TAKEN = -0x7FFFFFFF;

// Softmax over a token's experts; the likeliest K, the first of equals: choice k in lane k.
template <int EACH>
__device__ __forceinline__ void choose(const Route &p, int token, int lane, float &weight,
                                       int &expert) {
  float logits[EACH], peak = __int_as_float(0xFF800000), sum = 0.0f;
  int keys[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const bool is_expert = i * 32 + lane < p.num_experts;
    logits[i] = __int_as_float(0xFF800000);
    if (is_expert) logits[i] = value_of(p.logits[(size_t)token * p.logits_stride + i * 32 + lane]);
    keys[i] = is_expert ? order_of(logits[i]) : TAKEN;
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) peak = fmaxf(peak, logits[i]);
#pragma unroll
  for (int offset = 16; offset; offset >>= 1)
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, offset));
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (i * 32 + lane < p.num_experts) sum += __expf(logits[i] - peak);
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
  float own_logit = 0.0f;
  for (int k = 0; k < p.top_k; ++k) {
    int key = keys[0], own = 0;
    float logit = logits[0];
#pragma unroll
    for (int i = 1; i < EACH; ++i)
      if (keys[i] > key) key = keys[i], own = i, logit = logits[i];
    const int best = __reduce_max_sync(~0u, key);
    const int chosen = (int)__reduce_min_sync(~0u, key == best ? (u32)(own * 32 + lane) : ~0u);
    logit = __shfl_sync(~0u, logit, chosen & 31);
    if (lane == k) own_logit = logit, expert = chosen;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (i * 32 + lane == chosen) keys[i] = TAKEN;
  }
  weight = lane < p.top_k ? __expf(own_logit - peak) / sum : 0.0f;
  if (!p.renormalise) return;
  float total = weight;
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) total += __shfl_xor_sync(~0u, total, offset);
  weight /= total;
}

// One token, of one warp: every pair of this rank's is a tile.
template <int EACH> __device__ __forceinline__ void route_one(const Route &p) {
  release_dependents();
  wait_for_inputs();
  const int lane = threadIdx.x;
  float weight = 0.0f;
  int expert = -1;
  choose<EACH>(p, 0, lane, weight, expert);
  expert -= p.first;
  const bool is_own = p.positions[0] >= 0 && lane < p.top_k && p.has(expert);
  const u32 own = __ballot_sync(~0u, is_own);
  if (lane == 0) p.tiles[0] = __popc(own);
  if (lane >= p.top_k) return;
  p.weights[lane] = is_own ? weight : 0.0f;
  p.experts[lane] = is_own ? expert : -1;
  if (!is_own) return;
  const int tile = __popc(own & ((1u << lane) - 1));
  p.tiles[1 + tile] = expert;
  ((uint4 *)p.pairs)[tile] = make_uint4(0xFFFF0000u | lane, ~0u, ~0u, ~0u);
}

// A cluster of blocks, each for some tokens; the first of them then sorts all pairs.
template <int EACH> __device__ __forceinline__ void route(const Route &p) {
  __shared__ u32 tokens[MOST_EXPERTS][2];  // a bit for each token that has the expert
  __shared__ int first_tile[MOST_EXPERTS], warp_tiles[WARPS];
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
    const int expert = __ldcg(p.experts + pair), of = pair / p.top_k;
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
