// Epilogues for several tokens.
#pragma once

#include "arrange.cuh"
#include "tiles.cuh"

// Whether an epilogue only adds sums to values in memory.
__device__ __forceinline__ bool only_adds(const Product &p) { return p.epilogue == ADD && !p.bias; }

// A lane's values in memory, for rows g and g + 8 of a tile and tokens `token` + 8 m + i.
template <int MT> struct Addends {
  float old[MT][4];

  // Call `run` with each value's indices and place.
  template <class Run>
  __device__ __forceinline__ static void each(const Product &p, int token, int tile, int g,
                                              Run run) {
    const int row = tile * 16 + g;
    float *out = (float *)p.out + (size_t)token * p.out_stride + row;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (token + 8 * m + (i & 1) < p.num_tokens && row + (i >> 1) * 8 < p.num_rows)
          run(m, i, out + (size_t)(8 * m + (i & 1)) * p.out_stride + (i >> 1) * 8);
  }
  __device__ __forceinline__ void read(const Product &p, int token, int tile, int g) {
    each(p, token, tile, g, [&](int m, int i, float *place) { old[m][i] = *place; });
  }
  // Read the addends of an epilogue that only adds, before the sums are complete.
  __device__ __forceinline__ void read_early(const Product &p, int token, int tile, int g) {
    if (only_adds(p)) read(p, token, tile, g);
  }
  template <int F>
  __device__ __forceinline__ void add(const Product &p, int token, int tile, int g,
                                      const float (*sums)[4]) const {
    each(p, token, tile, g, [&](int m, int i, float *place) {
      if constexpr (F == NVFP4)
        *place = old[m][i] + scaled(p, tile * 16 + g + (i >> 1) * 8, sums[m][i]);
      else *place = old[m][i] + sums[m][i] * p.scale.all;
    });
  }
};

// Finish a lane's sums for rows g and g + 8 of a tile, and tokens `token` + 8 m + i. `early`: the
// addends, if already read.
template <int F, int MT>
__device__ __forceinline__ void finish_tile(const Product &p, int token, int tile, int g,
                                            const float (&sums)[MT][4],
                                            const Addends<MT> *early = nullptr) {
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
  if (only_adds(p)) {
    if (early) return early->template add<F>(p, token, tile, g, sums);
#pragma unroll
    for (int first = 0; first < MT; first += AT_ONCE) {
      Addends<AT_ONCE> addends;
      addends.read(p, token + 8 * first, tile, g);
      addends.template add<F>(p, token + 8 * first, tile, g, sums + first);
    }
    return;
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    finish<F>(p, token + m * 8, tile, g, sums[m][0], sums[m][2]);
    finish<F>(p, token + m * 8 + 1, tile, g, sums[m][1], sums[m][3]);
  }
}
