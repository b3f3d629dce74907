// Matmul of 5 to 128 tokens with bfloat16 weight rows. Compiled by NVRTC. Not batch-invariant: the
// weight determines the split of K, and the tile sizes change a token's sums.

#include "gemm_bf16.cuh"

#define DENSE(MT, G)                                                                              \
  extern "C" __global__ void __launch_bounds__(G * 128 + 32, G < 4 && MT < 16 ? 2 : 1)             \
  dense_bf16_##MT##_##G(const __grid_constant__ Dense p) { dense<MT, G>(p); }

DENSE(2, 1)
DENSE(4, 1)
DENSE(8, 1)
DENSE(16, 1)
DENSE(8, 2)
DENSE(16, 2)
DENSE(8, 4)
DENSE(16, 4)
