// RMSNorm of a token, as a kernel or inside a matmul of a token.
#pragma once

#include "tiles.cuh"

// Normalize a token's x to bfloat16 with 256 threads, 4 * VALUES columns per thread. Zeros pad K.
// `put` writes four columns. The norm's weights are constants, so with enough registers they are
// read before the inputs are ready.
template <int VALUES, class Put>
__device__ __forceinline__ void normalise_some(const float *x, const float *norm, int num_columns,
                                               int padded, float eps, Put put) {
  __shared__ float sums[8];
  constexpr bool EARLY = VALUES <= 4;
  float4 values[VALUES], weights[EARLY ? VALUES : 1];
  const int first = threadIdx.x * 4;
  if (EARLY) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      if (first + i * 1024 < num_columns) weights[i] = *(const float4 *)(norm + first + i * 1024);
  } else {
    for (int at = threadIdx.x * 32; at < num_columns; at += 256 * 32)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(norm + at));
  }
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < VALUES; ++i)
    if (first + i * 1024 < num_columns) values[i] = *(const float4 *)(x + first + i * 1024);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUES; ++i)
    if (first + i * 1024 < num_columns) {
      const float4 v = values[i];
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += sums[i];
  const float scale = rsqrtf(sum / num_columns + eps);
#pragma unroll
  for (int i = 0; i < VALUES; ++i) {
    const int at = first + i * 1024;
    if (at < num_columns) {
      const float4 v = values[i], w = EARLY ? weights[i] : *(const float4 *)(norm + at);
      put(at, make_uint2(pack2(v.x * scale * w.x, v.y * scale * w.y),
                         pack2(v.z * scale * w.z, v.w * scale * w.w)));
    } else if (at < padded) {
      put(at, make_uint2(0, 0));
    }
  }
}
// Up to 8192 columns. Waits for the inputs.
template <class Put>
__device__ __forceinline__ void normalise_by(const float *x, const float *norm, int num_columns,
                                             int padded, float eps, Put put) {
  if (padded <= 4096) normalise_some<4>(x, norm, num_columns, padded, eps, put);
  else normalise_some<8>(x, norm, num_columns, padded, eps, put);
}
__device__ __forceinline__ void normalise(const float *x, const float *norm, int num_columns,
                                          int padded, float eps, u16 *out) {
  normalise_by(x, norm, num_columns, padded, eps,
               [=](int at, uint2 four) { *(uint2 *)(out + at) = four; });
}
