// Keys and values from several pages in a lane's registers: as A fragments, or in memory format
// while the new token is missing. Values have a slice with a quarter of a warp's channels.
#pragma once

#include "attention_pages.cuh"

constexpr int MOST_PAGES = 4;            // per split, with a group per row
constexpr int SLICE = 128 / MOST_PAGES;  // channels

template <int F, int D> struct KeyTiles {
  static constexpr int WORDS = CHANNELS<D> * Shape<F, D>::BYTES / 16;  // per row in memory format
  u32 words[2][16];
  int largest;
  __device__ __forceinline__ void keep(const Keys<F, D> &k) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) words[row][i] = k.words[row][i];
      if (F == BFP8) words[row][8] = k.exponents[row][0], words[row][9] = k.exponents[row][1];
    }
  }
  __device__ __forceinline__ Keys<F, D> kept() const {
    Keys<F, D> k;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) k.words[row][i] = words[row][i];
      if (F == BFP8) k.exponents[row][0] = words[row][8], k.exponents[row][1] = words[row][9];
    }
    return k;
  }
  __device__ __forceinline__ void widen(const Keys<F, D> &k, int t) {
    largest = largest_of<F>(k.exponents, t);
    u32 shift = 0;
    if constexpr (F == BFP8) shift = Form<F>::shift_of(largest);
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 piece[4];
        key_piece(piece, k, row, i, t, shift);
#pragma unroll
        for (int j = 0; j < 4; ++j) words[row][4 * i + j] = piece[j];
      }
  }
};
// Memory format: words for a lane's four rows. For bfp8 also an exponent word for all channels in a
// warp, from row g / 2.
template <int F> struct ValueTiles {
  static constexpr int WORDS = Shape<F, SLICE>::V_WORDS;  // per row in memory format
  u32 words[8];
  __device__ __forceinline__ void keep(const Values<F, SLICE> &v, u32 exponents) {
#pragma unroll
    for (int i = 0; i < 4 * WORDS; ++i) words[i] = v.words[i / WORDS][i % WORDS];
    if (F == BFP8) words[4] = exponents;
  }
  __device__ __forceinline__ Values<F, SLICE> kept() const {
    Values<F, SLICE> v;
#pragma unroll
    for (int i = 0; i < 4 * WORDS; ++i) v.words[i / WORDS][i % WORDS] = words[i];
    return v;
  }
  // Return the largest exponent of these values and of earlier pages. `before`: of earlier pages.
  __device__ __forceinline__ int widen(Values<F, SLICE> v, u32 exponents, int before, int slice,
                                       int g, int t) {
    int largest = before;
    if constexpr (F == BFP8)
      largest = max(before, Form<F>::share_exponents(v.exponents, exponents, slice, t));
    const Pairs<F, SLICE> pairs(v, largest, g);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      u32 tile[4];
      tile_of(tile, pairs, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[4 * j + i] = tile[i];
    }
    return largest;
  }
};
