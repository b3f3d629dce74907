// Matmul of 5 to 128 tokens with plain weight rows: bfloat16, or e4m3 codes for weights and tokens
// with a power of two per row. Compiled by NVRTC. Not batch-invariant: the weight determines the
// split of K, and the tile sizes change a token's sums.

#include "gemm_bf16.cuh"
#include "norm.cuh"

struct NormCodes {
  const float *x, *norm;  // fp32 [num_tokens, x_stride] with num_columns values; [num_columns]
  u8 *codes;              // [num_tokens, codes_stride]
  float *scales;          // [num_tokens]
  int num_columns, x_stride, codes_stride;
  float eps;
};

// Write a token's norm, rounded to bfloat16, as codes with a power of two. A block per token.
extern "C" __global__ void __launch_bounds__(256) norm_codes(const NormCodes p) {
  __shared__ u32 each[8];
  uint2 values[8];
  release_dependents();
  const size_t token = blockIdx.x;
  u32 largest = 0;  // float bits, which have the order of the floats
  auto put = [&](int at, uint2 four) {
    values[(at - (int)threadIdx.x * 4) >> 10] = four;
    const u32 a = four.x & 0x7FFF7FFFu, b = four.y & 0x7FFF7FFFu;
    largest = max(max(largest, max(a << 16, a & 0xFFFF0000u)), max(b << 16, b & 0xFFFF0000u));
  };
  normalise_by(p.x + token * p.x_stride, p.norm, p.num_columns, p.num_columns, p.eps, put);
#pragma unroll
  for (int offset = 16; offset; offset >>= 1)
    largest = max(largest, __shfl_xor_sync(~0u, largest, offset));
  if ((threadIdx.x & 31) == 0) each[threadIdx.x >> 5] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, each[i]);
  const int field = max((int)(largest >> 23) - 7, 1);  // see e4m3.py
  const float inverse = __uint_as_float((u32)(254 - field) << 23);
  if (threadIdx.x == 0)
    p.scales[token] = largest ? __uint_as_float((u32)field << 23) : 1.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = threadIdx.x * 4 + i * 1024;
    if (at >= p.num_columns) break;
    const uint2 four = values[i];
    const u32 low = codes2(__uint_as_float(four.x << 16) * inverse,
                           __uint_as_float(four.x & 0xFFFF0000u) * inverse);
    const u32 high = codes2(__uint_as_float(four.y << 16) * inverse,
                            __uint_as_float(four.y & 0xFFFF0000u) * inverse);
    *(u32 *)(p.codes + token * p.codes_stride + at) = low | high << 16;
  }
}

#define DENSE(name, T, MT, G)                                                                     \
  extern "C" __global__ void __launch_bounds__(G * 128 + 32, G < 4 && MT < 16 ? 2 : 1)             \
  dense_##name##_##MT##_##G(const __grid_constant__ Dense p) { dense<T, MT, G>(p); }

DENSE(bf16, BF16, 2, 1)
DENSE(bf16, BF16, 4, 1)
DENSE(bf16, BF16, 8, 1)
DENSE(bf16, BF16, 16, 1)
DENSE(bf16, BF16, 8, 2)
DENSE(bf16, BF16, 16, 2)
DENSE(bf16, BF16, 8, 4)
DENSE(bf16, BF16, 16, 4)
DENSE(e4m3, E4M3, 8, 2)
DENSE(e4m3, E4M3, 8, 4)
