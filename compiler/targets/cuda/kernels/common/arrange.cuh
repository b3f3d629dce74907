// Layout of x for matmuls with decoded weights on the matrix unit. See `arrange` in gemm_block.cu.
#pragma once

#include "primitives.cuh"

constexpr int CHUNK = 64, CHUNK_BYTES = 128;  // contiguous columns, and bytes per token

// Return the index of a column's 16-byte block in its chunk.
template <bool CODED> __device__ __forceinline__ int piece_of(int column) {
  return CODED ? (column >> 3 & 4) + (column >> 1 & 3) : column >> 1 & 7;
}

// Write a token's values for four columns from `column`, a multiple of 4.
__device__ __forceinline__ void arrange_four(void *out, int num_places, int place, int column,
                                             bool is_coded, uint2 four) {
  const int t = column >> (is_coded ? 3 : 4) & 3;
  const int piece = is_coded ? piece_of<true>(column) : piece_of<false>(column);
  u8 *chunk = (u8 *)out + ((size_t)(column / CHUNK) * num_places + place) * CHUNK_BYTES + 4 * t;
  *(u32 *)(chunk + (piece ^ (place & 7)) * 16) = four.x;
  *(u32 *)(chunk + ((piece | 1) ^ (place & 7)) * 16) = four.y;
}
