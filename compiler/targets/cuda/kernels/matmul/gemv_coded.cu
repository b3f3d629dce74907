// Matmuls of 1 to 64 tokens with a weight in code tiles. See gemv.cu for the arithmetic and
// coded_tiles.py for the layout. A block's sums are multiplied by the block's scale in float32.
// Compiled by NVRTC.

#include "gemm.cuh"
#include "gemv.cuh"

GEMV(q40, Q40, 0, 6)
GEMV(q40, Q40, 0, 8)
GEMV(q40, Q40, 0, 10)
GEMV(q40, Q40, 1, 3)
GEMV(q40, Q40, 2, 3)
GEMM(q40, Q40, 1, 1, 4)
GEMM(q40, Q40, 2, 1, 5)
GEMM(q40, Q40, 4, 1, 4)
GEMM(q40, Q40, 8, 1, 4)
GEMV(q80, Q80, 0, 3)
GEMV(q80, Q80, 0, 4)
GEMV(q80, Q80, 1, 4)
GEMV(q80, Q80, 2, 4)
GEMM(q80, Q80, 1, 1, 3)
GEMM(q80, Q80, 1, 1, 4)
GEMM(q80, Q80, 2, 1, 4)
GEMM(q80, Q80, 4, 1, 3)
GEMM(q80, Q80, 4, 1, 4)
GEMM(q80, Q80, 8, 1, 3)
GEMV(fp8, FP8, 0, 3)
GEMV(fp8, FP8, 0, 4)
GEMV(fp8, FP8, 1, 4)
GEMV(fp8, FP8, 2, 4)
GEMM(fp8, FP8, 1, 1, 3)
GEMM(fp8, FP8, 1, 1, 4)
GEMM(fp8, FP8, 2, 1, 4)
GEMM(fp8, FP8, 4, 1, 3)
GEMM(fp8, FP8, 4, 1, 4)
GEMM(fp8, FP8, 8, 1, 3)
