// Matmul of 17 to 512 tokens with a block-format weight, and the layout of its x. Compiled by
// NVRTC. See packing.py for the weight layout. A token has the bits from gemv.cu: sums over K and
// over slices have the same order. Exceptions: a weight with slices in gemv.cu and an unsplit K
// here, and `gemm_split`, which splits K in another way.

#include "norm.cuh"
#include "gemm_block.cuh"

struct Arrange {
  const u16 *x;  // bf16 [num_tokens, x_stride] with num_columns values
  u8 *out;       // [num_chunks, places, 128 bytes]
  int num_tokens, num_places, num_columns, x_stride, is_coded;
};

// Write x for the matrix unit with decoded weights: chunks of 64 columns for all tokens. Columns
// are in the order of the lanes' fragments: column `16 t + 4 s + 2 r + e` is at `16 s + 8 r + 2 t +
// e`. Code tiles have `32 (s / 2) + 8 t + 4 (s % 2) + 2 r + e` instead. 16-byte units are swizzled
// by row. A thread writes a unit. Rows past the tokens are zero.
extern "C" __global__ void __launch_bounds__(256) arrange(const Arrange p) {
  release_dependents();
  const int place = blockIdx.x * 32 + (threadIdx.x >> 3), at = threadIdx.x & 7;
  const int chunk = blockIdx.y;
  wait_for_inputs();
  if (place >= p.num_places) return;
  const int piece = at ^ (place & 7);  // step s with 16 columns, and half r
  u32 v[4] = {};
  if (place < p.num_tokens) {
    const u16 *from = p.x + (size_t)place * p.x_stride;
    const int each = p.is_coded ? 8 : 16;
    const int column = chunk * CHUNK + (p.is_coded ? (piece & 4) * 8 + (piece & 3) * 2 : piece * 2);
#pragma unroll
    for (int t = 0; t < 4; ++t)
      if (column + each * t < p.num_columns) v[t] = *(const u32 *)(from + column + each * t);
  }
  u8 *to = p.out + ((size_t)chunk * p.num_places + place) * CHUNK_BYTES + at * 16;
  *(uint4 *)to = make_uint4(v[0], v[1], v[2], v[3]);
}

struct ArrangeNorm {
  const float *x, *norm;  // fp32 [num_tokens, x_stride] with num_columns values; [num_columns]
  u8 *out;                // see Arrange
  int num_places, num_columns, x_stride, padded, is_coded;
  float eps;
};

// Write the norm of x in the same layout, with a block per token. `padded` columns are whole tiles.
extern "C" __global__ void __launch_bounds__(256) arrange_norm(const ArrangeNorm p) {
  release_dependents();
  const int place = blockIdx.x;
  auto put = [&](int at, uint2 four) {
    arrange_four(p.out, p.num_places, place, at, p.is_coded, four);
  };
  normalise_by(p.x + (size_t)place * p.x_stride, p.norm, p.num_columns, p.padded, p.eps, put);
}

UNSPLIT(bfp8, BFP8, 4, 2, 2)
UNSPLIT(bfp8, BFP8, 8, 2, 2)
UNSPLIT(bfp8, BFP8, 16, 2, 2)
UNSPLIT(bfp8, BFP8, 24, 2, 1)
CUT(bfp8, BFP8, 4, 4, 1)
CUT(bfp8, BFP8, 8, 4, 1)
CUT(bfp8, BFP8, 8, 1, 3)
JOINED(bfp8, BFP8, 8, 2)
UNSPLIT(bfp4, BFP4, 4, 2, 2)
UNSPLIT(bfp4, BFP4, 8, 2, 2)
UNSPLIT(bfp4, BFP4, 16, 2, 2)
UNSPLIT(bfp4, BFP4, 24, 2, 1)
CUT(bfp4, BFP4, 4, 4, 1)
CUT(bfp4, BFP4, 8, 4, 1)
CUT(bfp4, BFP4, 8, 1, 3)
JOINED(bfp4, BFP4, 8, 2)
SPLIT(bfp8, BFP8, 4, 4)
SPLIT(bfp4, BFP4, 4, 4)
