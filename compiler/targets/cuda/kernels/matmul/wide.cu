// Products of 17 to 512 tokens with a weight in blocks, and how their x is laid out for them.
// Compiled by NVRTC; held.py says how weights lie. A token's result has the bits that linear.cu
// gives it: the same chains over K, slices added in the same order. But for a weight of slices that
// is walked over whole.

#include "norm.cuh"
#include "wide.cuh"

struct Arrange {
  const u16 *x;  // bf16 [num_tokens, x_stride], of which num_columns count
  u8 *out;       // [num_chunks, places, 128 bytes]
  int num_tokens, num_places, num_columns, x_stride, is_coded;
};

// x as the matrix unit reads it beside decoded weights: 64 columns of all tokens together, columns
// in the order of a lane's fragments (16 t + 4 s + 2 r + e at 16 s + 8 r + 2 t + e), pieces of 16
// bytes exchanged by row. A thread a piece; places behind the tokens are zeros. Code tiles have
// 32 (s / 2) + 8 t + 4 (s % 2) + 2 r + e instead.
extern "C" __global__ void __launch_bounds__(256) arrange(const Arrange p) {
  release_dependents();
  const int place = blockIdx.x * 32 + (threadIdx.x >> 3), at = threadIdx.x & 7;
  const int chunk = blockIdx.y;
  wait_for_inputs();
  if (place >= p.num_places) return;
  const int piece = at ^ (place & 7);  // its step s of 16 columns, and the half r of that
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
  const float *x, *norm;  // fp32 [num_tokens, x_stride], of which num_columns count; [num_columns]
  u8 *out;                // as above
  int num_places, num_columns, x_stride, padded, is_coded;
  float eps;
};

// The same of a token's norm, a block a token; padded: whole tiles of 128 columns.
extern "C" __global__ void __launch_bounds__(256) arrange_norm(const ArrangeNorm p) {
  release_dependents();
  const int place = blockIdx.x;
  u8 *to = p.out + (size_t)place * CHUNK_BYTES;
  auto put = [&](int at, uint2 four) {
    const int t = at >> (p.is_coded ? 3 : 4) & 3;
    const int piece = p.is_coded ? piece_of<true>(at) : piece_of<false>(at);
    u8 *chunk = to + (size_t)(at / CHUNK) * p.num_places * CHUNK_BYTES + 4 * t;
    *(u32 *)(chunk + (piece ^ (place & 7)) * 16) = four.x;
    *(u32 *)(chunk + ((piece | 1) ^ (place & 7)) * 16) = four.y;
  };
  normalise_by(p.x + (size_t)place * p.x_stride, p.norm, p.num_columns, p.padded, p.eps, put);
}

WIDE(bfp8, BFP8, 4, 2, 2)
WIDE(bfp8, BFP8, 8, 2, 2)
WIDE(bfp8, BFP8, 16, 2, 2)
WIDE(bfp8, BFP8, 24, 2, 1)
WIDE(bfp8, BFP8, 4, 4, 1)
CUT(bfp8, BFP8, 4, 4, 1)
CUT(bfp8, BFP8, 8, 4, 1)
CUT(bfp8, BFP8, 8, 1, 3)
JOINED(bfp8, BFP8, 8, 2)
WIDE(bfp4, BFP4, 4, 2, 2)
WIDE(bfp4, BFP4, 8, 2, 2)
WIDE(bfp4, BFP4, 16, 2, 2)
WIDE(bfp4, BFP4, 24, 2, 1)
CUT(bfp4, BFP4, 4, 4, 1)
CUT(bfp4, BFP4, 8, 4, 1)
CUT(bfp4, BFP4, 8, 1, 3)
JOINED(bfp4, BFP4, 8, 2)
