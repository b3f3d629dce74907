// Epilogues for several tokens.
#pragma once

#include "arrange.cuh"
#include "tiles.cuh"

// What becomes of a lane's sums: rows g and g + 8 of a tile, tokens `token` + 8 m and one on. What is
// added to is read before anything is written.
template <int F, int MT>
__device__ __forceinline__ void finish_tile(const Product &p, int token, int tile, int g,
                                            float (&sums)[MT][4]) {
  constexpr int AT_ONCE = MT < 4 ? MT : 4;
  constexpr bool CODED = is_coded<F>;
  if (tile >= p.num_tiles) return;
  if (p.places) {  // as `arrange` of gemm_block.cu does
    const int column = tile * 8 + g, piece = piece_of<CODED>(column);
    Product to = p;
    u8 *out = (u8 *)p.out + (size_t)(column / CHUNK) * p.places * CHUNK_BYTES +
              (column >> (CODED ? 3 : 4) & 3) * 4 + (column & 1) * 2;
    to.out_stride = 0;
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
      const int place = token + (i >> 1) * 8 + (i & 1);
      to.out = out + (size_t)place * CHUNK_BYTES + ((piece ^ place) & 7) * 16 - (tile * 8 + g) * 2;
      finish<F>(to, place, tile, g, sums[i >> 1][i & 1], sums[i >> 1][2 + (i & 1)]);
    }
    return;
  }
  if (p.epilogue == ADD && !p.bias) {
    const int row = tile * 16 + g;
    float *out = (float *)p.out + (size_t)token * p.out_stride + row;
    auto is_there = [&](int m, int i) {
      return token + 8 * m + (i & 1) < p.num_tokens && row + (i >> 1) * 8 < p.num_rows;
    };
    auto place = [&](int m, int i) {
      return out + (size_t)(8 * m + (i & 1)) * p.out_stride + (i >> 1) * 8;
    };
#pragma unroll
    for (int first = 0; first < MT; first += AT_ONCE) {
      float old[AT_ONCE][4];
#pragma unroll
      for (int m = 0; m < AT_ONCE; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (is_there(first + m, i)) old[m][i] = *place(first + m, i);
#pragma unroll
      for (int m = 0; m < AT_ONCE; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (is_there(first + m, i))
            if constexpr (F == NVFP4)
              *place(first + m, i) = old[m][i] + scaled(p, row + (i >> 1) * 8, sums[first + m][i]);
            else *place(first + m, i) = old[m][i] + sums[first + m][i] * p.scale.all;
    }
    return;
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    finish<F>(p, token + m * 8, tile, g, sums[m][0], sums[m][2]);
    finish<F>(p, token + m * 8 + 1, tile, g, sums[m][1], sums[m][3]);
  }
}
