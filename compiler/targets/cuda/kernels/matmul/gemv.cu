// Matmul of 1 to 64 tokens with a single read of the weight: y[M, N] = x[M, K] W[N, K]^T.
//
// mma.m16n8k16 with 16 rows of W as A and 8 tokens as B. Tiles in block formats permute K for
// 16-byte reads by each lane. See packing.py for the layout. For small weights, K is split into 8
// slices. The matrix unit adds each slice in order, then the slices are added in order. For large
// weights, K is not split. All kernels here give a token the same bits for any batch. Compiled by
// NVRTC without other headers.

#include "gemm.cuh"
#include "gemv.cuh"

struct Leaving {
  Product product;  // for a single token, with a norm
  u16 *normed;      // bf16 [K], padded: also receives the norm
};

extern "C" __global__ void __launch_bounds__(256)
rms_norm(const float *x, const float *norm, u16 *out, int num_columns, int x_stride, int out_stride,
         float eps) {
  release_dependents();
  const size_t token = blockIdx.x;
  normalise(x + token * x_stride, norm, num_columns, num_columns, eps, out + token * out_stride);
}

#define LEAVES(name, F, DEPTH)                                                                    \
  extern "C" __global__ void __launch_bounds__(256, 3)                                            \
  leaves_##name##_##DEPTH(const Leaving p) { gemv<F, 0, DEPTH, true>(p.product, p.normed); }

GEMV(bf16, BF16, 0, 2)
GEMV(bf16, BF16, 0, 3)
LEAVES(bf16, BF16, 2)
LEAVES(bf16, BF16, 3)
GEMV(bfp8, BFP8, 0, 3)
GEMV(bfp8, BFP8, 0, 4)
GEMV(bfp4, BFP4, 0, 6)
GEMV(bfp4, BFP4, 0, 8)
GEMV(bfp4, BFP4, 0, 10)
GEMV(bf16, BF16, 1, 3)
GEMV(bf16, BF16, 2, 3)
GEMV(bfp8, BFP8, 1, 4)
GEMV(bfp8, BFP8, 2, 4)
GEMV(bfp4, BFP4, 1, 3)
GEMV(bfp4, BFP4, 2, 3)
GEMM(bf16, BF16, 1, 1, 2)
GEMM(bf16, BF16, 1, 1, 3)
GEMM(bf16, BF16, 1, 1, 4)
GEMM(bf16, BF16, 2, 1, 2)
GEMM(bf16, BF16, 4, 1, 2)
GEMM(bf16, BF16, 4, 2, 3)
GEMM(bfp8, BFP8, 1, 1, 3)
GEMM(bfp8, BFP8, 1, 1, 4)
GEMM(bfp8, BFP8, 2, 1, 4)
GEMM(bfp8, BFP8, 4, 1, 3)
GEMM(bfp8, BFP8, 4, 1, 4)
GEMM(bfp8, BFP8, 8, 1, 3)
GEMM(bfp4, BFP4, 1, 1, 4)
GEMM(bfp4, BFP4, 2, 1, 5)
GEMM(bfp4, BFP4, 4, 1, 4)
GEMM(bfp4, BFP4, 8, 1, 4)
