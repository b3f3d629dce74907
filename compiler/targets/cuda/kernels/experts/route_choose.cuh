// Expert selection for a token by a warp. Selection k is in lane k.
#pragma once

#include "primitives.cuh"

struct Route {
  const Value *logits;         // [B, logits_stride]
  const long long *positions;  // [B], negative for padding
  float *weights;              // [B, K]
  int *experts;  // [B, K], numbered from `first`; -1 for padding and experts on peers
  int *tiles;  // [1 + N]: tile count, then each tile's expert
  short *pairs;  // [N, 8], padded with -1
  int num_tokens, num_experts, top_k, logits_stride, renormalise;
  int first, count;  // range of this rank's experts; pairs on peers are treated as padding
  __device__ __forceinline__ bool has(int expert) const { return (u32)expert < (u32)count; }
};

// Map a float to an integer in the same order. NaN precedes all numbers.
__device__ __forceinline__ int order_of(float x) {
  const int bits = __float_as_int(x);
  if (x != x) return -0x7FFFFFFE;
  return bits < 0 ? (bits ^ 0x7FFFFFFF) + 1 : bits;
}
constexpr int TAKEN = -0x7FFFFFFF;

// Softmax over a token's experts and selection of the K likeliest. The first of equal logits wins,
// and selection k is in lane k. WITHIN: the caller is a matmul kernel before its wait. Without
// WEIGHS, `weight` is unchanged.
template <int EACH, bool WITHIN = false, bool WEIGHS = true>
__device__ __forceinline__ void choose(const Route &p, int token, int lane, float &weight,
                                       int &expert) {
  float logits[EACH], peak = __int_as_float(0xFF800000), sum = 0.0f;
  int keys[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const bool is_expert = i * 32 + lane < p.num_experts;
    logits[i] = __int_as_float(0xFF800000);
    const Value *at = p.logits + (size_t)token * p.logits_stride + i * 32 + lane;
    if (is_expert) logits[i] = WITHIN ? __uint_as_float(read_past4(at)) : value_of(*at);
    keys[i] = is_expert ? order_of(logits[i]) : TAKEN;
  }
  if (WEIGHS) {
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
  }
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
  if (!WEIGHS) return;
  weight = lane < p.top_k ? __expf(own_logit - peak) / sum : 0.0f;
  if (!p.renormalise) return;
  float total = weight;
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) total += __shfl_xor_sync(~0u, total, offset);
  weight /= total;
}

// Select for a single token. Each pair of this rank is a tile. `weights` and `experts` may be null.
template <int EACH, bool WITHIN, bool WEIGHS>
__device__ __forceinline__ void choose_one(const Route &p, int lane, float *weights, int *experts,
                                           int *tiles, short *pairs) {
  const int sign = WITHIN ? (int)read_past4((const int *)p.positions + 1) : p.positions[0] >> 32;
  float weight = 0.0f;
  int expert = -1;
  choose<EACH, WITHIN, WEIGHS>(p, 0, lane, weight, expert);
  expert -= p.first;
  const bool is_own = sign >= 0 && lane < p.top_k && p.has(expert);
  const u32 own = __ballot_sync(~0u, is_own);
  if (lane == 0) tiles[0] = __popc(own);
  if (lane >= p.top_k) return;
  if (WEIGHS) weights[lane] = is_own ? weight : 0.0f;
  if (experts) experts[lane] = is_own ? expert : -1;
  if (!is_own) return;
  const int tile = __popc(own & ((1u << lane) - 1));
  tiles[1 + tile] = expert;
  ((uint4 *)pairs)[tile] = make_uint4(0xFFFF0000u | lane, ~0u, ~0u, ~0u);
}
