// Linear attention in decode steps: reads, cluster exchange, convolution and unit vectors. Excludes
// the state. Sums use explicit `fmaf`, so that kernels for one token and for several have equal bits.
#pragma once

#include "attention_primitives.cuh"
#include "delta_gates.cuh"

constexpr int MOST_BLOCKS = 8;  // of a cluster
constexpr int MOST_KEPT = 3;    // values of a channel's window

// Read a constant that kernels never write. The asm prevents a move after the wait.
__device__ __forceinline__ float read_constant(const float *from) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
// Send to the same address in a block of the cluster. Its barrier counts the bytes.
__device__ __forceinline__ void send_to(int rank, float4 *to, float4 v, void *barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(in_block(to, rank)),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(in_block(barrier, rank)) : "memory");
}
__device__ __forceinline__ void send_to(int rank, float *to, float v, void *barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   in_block(to, rank)), "f"(v), "r"(in_block(barrier, rank)) : "memory");
}
// Read data that this step does not need again: no allocation in L1 and early eviction from L2. L1
// must not have a stale line of an earlier kernel. This holds because the prefill kernels, which
// read state otherwise, precede an early read by a whole graph launch.
__device__ __forceinline__ float4 read_stream(const float *from) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void write_stream(float *to, float4 v) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
__device__ __forceinline__ void add_scaled(float4 &sum, float factor, float4 v) {
  sum.x = fmaf(factor, v.x, sum.x), sum.y = fmaf(factor, v.y, sum.y);
  sum.z = fmaf(factor, v.z, sum.z), sum.w = fmaf(factor, v.w, sum.w);
}
__device__ __forceinline__ void add_other_lanes(float4 &v, int distance) {
  v.x += __shfl_xor_sync(~0u, v.x, distance), v.y += __shfl_xor_sync(~0u, v.y, distance);
  v.z += __shfl_xor_sync(~0u, v.z, distance), v.w += __shfl_xor_sync(~0u, v.w, distance);
}
// Add the warps' sums for four columns, in order.
template <int WARPS, int COLS>
__device__ __forceinline__ float4 all_warps(const float (&sums)[WARPS][COLS], int first) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) add_scaled(total, 1.0f, *(const float4 *)(sums[w] + first));
  return total;
}
// Multiply the state's rows of a thread by q and k, and add the products.
template <int ROWS>
__device__ __forceinline__ void multiply(float4 &by_q, float4 &by_k, const float *qs,
                                         const float *ks, const float4 (&state)[ROWS]) {
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    const float4 q = *(const float4 *)(qs + i), k = *(const float4 *)(ks + i);
    add_scaled(by_q, q.x, state[i]), add_scaled(by_k, k.x, state[i]);
    add_scaled(by_q, q.y, state[i + 1]), add_scaled(by_k, k.y, state[i + 1]);
    add_scaled(by_q, q.z, state[i + 2]), add_scaled(by_k, k.z, state[i + 2]);
    add_scaled(by_q, q.w, state[i + 3]), add_scaled(by_k, k.w, state[i + 3]);
  }
}
// Add the halves of a warp. The lower half gets the sums for k, and the upper half for q.
template <int LANES>
__device__ __forceinline__ float4 add_lanes(float4 by_q, float4 by_k, bool is_upper) {
  float4 kept = is_upper ? by_q : by_k;
  const float4 given = is_upper ? by_k : by_q;
  kept.x += __shfl_xor_sync(~0u, given.x, 16), kept.y += __shfl_xor_sync(~0u, given.y, 16);
  kept.z += __shfl_xor_sync(~0u, given.z, 16), kept.w += __shfl_xor_sync(~0u, given.w, 16);
  if (LANES == 8) add_other_lanes(kept, 8);
  return kept;
}

struct Factors {
  float q, k, dot;  // for unit vectors, and their product
};

// Compute the factors for unit vectors q and k, and their product, with one warp.
template <int D>
__device__ __forceinline__ void measure(Factors &factors, const float *qs, const float *ks,
                                        int lane) {
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
  for (int i = 0; i < D; i += 32) {
    const float q = qs[i + lane], k = ks[i + lane];
    qq = fmaf(q, q, qq), kk = fmaf(k, k, kk), qk = fmaf(q, k, qk);
  }
#pragma unroll
  for (int distance = 16; distance; distance >>= 1) {
    qq += __shfl_xor_sync(~0u, qq, distance);
    kk += __shfl_xor_sync(~0u, kk, distance);
    qk += __shfl_xor_sync(~0u, qk, distance);
  }
  if (lane == 0) {
    constexpr float ROOT = D == 128 ? 0.08838834764831845f : 0.125f;  // sqrt(1 / D)
    const float q_factor = rsqrtf(qq + UNIT_EPS) * ROOT, k_factor = rsqrtf(kk + UNIT_EPS);
    factors.q = q_factor;
    factors.k = k_factor;
    factors.dot = qk * q_factor * k_factor;
  }
}

// A channel's convolution and window.
struct Channel {
  float taps[MOST_KEPT], own_tap, old[MOST_KEPT], x;

  __device__ __forceinline__ void read_taps(const float *weight, int width) {
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i) {
      taps[i] = 0.0f;
      if (i < width - 1) taps[i] = read_constant(weight + i);
    }
    own_tap = read_constant(weight + width - 1);
  }
  __device__ __forceinline__ void read_window(const float *window, int width, bool wanted) {
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i) {
      old[i] = 0.0f;
      if (wanted && i < width - 1) old[i] = read_float(window + i);
    }
  }
  __device__ __forceinline__ void move_on(float *window, int width) const {
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i)
      if (i < width - 1)
        window[i] = i == width - 2 || i + 1 == MOST_KEPT ? x : old[(i + 1) % MOST_KEPT];
  }
  __device__ __forceinline__ void shift(int width) {
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i)
      if (i < width - 1)
        old[i] = i == width - 2 || i + 1 == MOST_KEPT ? x : old[(i + 1) % MOST_KEPT];
  }
  __device__ __forceinline__ float convolved() const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i) total = fmaf(old[i], taps[i], total);
    total = fmaf(x, own_tap, total);
    return total * sigmoid(total);
  }
};

// Return w in delta_step.cu for four columns.
__device__ __forceinline__ float4 errors(float4 v, float by_decay, float4 predicted, float beta) {
  add_scaled(v, -by_decay, predicted);
  return make_float4(v.x * beta, v.y * beta, v.z * beta, v.w * beta);
}
__device__ __forceinline__ float square_of(float4 v) {
  return fmaf(v.x, v.x, v.y * v.y) + fmaf(v.z, v.z, v.w * v.w);
}
__device__ __forceinline__ float4 next_state(float4 state, float decay, float k, float4 wrong) {
  float4 next = make_float4(state.x * decay, state.y * decay, state.z * decay, state.w * decay);
  add_scaled(next, k, wrong);
  return next;
}
__device__ __forceinline__ float4 gated(float4 result, float factor, float4 gate) {
  return make_float4(result.x * factor * gate.x, result.y * factor * gate.y,
                     result.z * factor * gate.z, result.w * factor * gate.w);
}
