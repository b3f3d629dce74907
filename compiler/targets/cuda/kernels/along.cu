// Two products of one token in one launch: one of a weight in blocks, and along with it a small one
// in bfloat16 of the same x, as linear attention's gates are, which alone is but a wait for what
// comes before it. Each is a walk of linear.cu, with its bits.
// Compiled by NVRTC; held.py says how weights lie.

#include "gemv.cuh"

struct Both {
  Product main, along;
  u32 num_main;  // blocks of the first; those behind them are the second's
};

#define BOTH(name, F, DEPTH, DEPTH_ALONG)                                                         \
  extern "C" __global__ void __launch_bounds__(256, 3)                                            \
  gemv_along_##name##_##DEPTH(const Both p) {                                                     \
    if (blockIdx.x < p.num_main) gemv<F, 0, DEPTH>(p.main, blockIdx.x, p.num_main);               \
    else gemv<BF16, 0, DEPTH_ALONG>(p.along, blockIdx.x - p.num_main, gridDim.x - p.num_main);    \
  }

BOTH(bfp8, BFP8, 4, 2)
BOTH(bfp4, BFP4, 3, 2)
