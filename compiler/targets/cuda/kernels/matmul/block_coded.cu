// Matmuls of 17 to 512 tokens with a weight in code tiles, with the bits of gemv_coded.cu.
// Compiled by NVRTC. gemm_block.cu arranges x.

#include "gemm_block.cuh"

UNSPLIT(q40, Q40, 4, 2, 2)
UNSPLIT(q40, Q40, 8, 2, 2)
UNSPLIT(q40, Q40, 16, 2, 1)
CUT(q40, Q40, 4, 4, 1)
CUT(q40, Q40, 8, 1, 3)
JOINED(q40, Q40, 8, 2)
UNSPLIT(q80, Q80, 4, 2, 2)
UNSPLIT(q80, Q80, 8, 2, 2)
UNSPLIT(q80, Q80, 16, 2, 1)
CUT(q80, Q80, 4, 4, 1)
CUT(q80, Q80, 8, 1, 3)
JOINED(q80, Q80, 8, 2)
UNSPLIT(fp8, FP8, 4, 2, 2)
UNSPLIT(fp8, FP8, 8, 2, 2)
UNSPLIT(fp8, FP8, 16, 2, 1)
CUT(fp8, FP8, 4, 4, 1)
CUT(fp8, FP8, 8, 1, 3)
JOINED(fp8, FP8, 8, 2)
