// Matmuls with experts in prompts, for weights in block formats. Weights are decoded in registers,
// as in gemm_block.cuh. A tile has pairs with one expert (route_triton.py). Compiled by NVRTC.

#include "gemm_block.cuh"

struct PairTiles {
  const int *order, *tiles;  // [pairs], and [3, num_tiles] with expert or -1, first pair and end
  int num_tiles, top_k;
};

struct ArrangePairs {
  PairTiles pairs;
  const u16 *x;  // bf16 [T, x_stride]. Pair k of a token starts at column k x_each.
  u8 *out;       // see Arrange in gemm_block.cu, with a place per pair of a tile
  int tile_size, num_columns, x_stride, x_each;
};

// Write x for the matrix unit, as `arrange` in gemm_block.cu. Places after a tile's pairs are not
// written, because a place's sums do not depend on other places.
extern "C" __global__ void __launch_bounds__(256) arrange_pairs(const ArrangePairs p) {
  release_dependents();
  const int place = blockIdx.x * 32 + (threadIdx.x >> 3), at = threadIdx.x & 7;
  const int chunk = blockIdx.y, tile = place / p.tile_size, num_tiles = p.pairs.num_tiles;
  wait_for_inputs();
  if (p.pairs.tiles[tile] < 0) return;
  const int index = p.pairs.tiles[num_tiles + tile] + place - tile * p.tile_size;
  if (index >= p.pairs.tiles[2 * num_tiles + tile]) return;
  const int pair = p.pairs.order[index], token = pair / p.pairs.top_k;
  const u16 *from =
      p.x + (size_t)token * p.x_stride + (size_t)(pair - token * p.pairs.top_k) * p.x_each;
  const int piece = at ^ (place & 7), column = chunk * CHUNK + piece * 2;
  u32 v[4] = {};
#pragma unroll
  for (int t = 0; t < 4; ++t)
    if (column + 16 * t < p.num_columns) v[t] = *(const u32 *)(from + column + 16 * t);
  const size_t num_places = (size_t)num_tiles * p.tile_size;
  u8 *to = p.out + (chunk * num_places + place) * CHUNK_BYTES + at * 16;
  *(uint4 *)to = make_uint4(v[0], v[1], v[2], v[3]);
}

struct GemmExperts {
  GemmBlock gemm;  // rows and tiles of an expert, places as x_stride
  PairTiles pairs;
  const float *bias;  // [experts, rows], gate rows before up rows with SWIGLU, or null
  int out_each;       // stride between a token's pairs
  float limit, alpha;  // of a clamped SwiGLU, or a plain SwiGLU with limit 0
};

// Store a lane's sums as bf16, or the activations of its gates and ups. Its rows are g and g + 8.
template <int MT>
__device__ __forceinline__ void store_pairs(const GemmExperts &p, int expert, int first, int end,
                                            int tile, float (&sums)[MT][4]) {
  const Product &of = p.gemm.product;
  if (tile >= of.num_tiles) return;
  const int g = (threadIdx.x & 31) >> 2;
  const bool is_paired = of.epilogue == SWIGLU;
  const int row = tile * (is_paired ? 8 : 16) + g, other = is_paired ? of.num_rows : 8;
  const bool has_top = row < of.num_rows, has_low = is_paired ? has_top : row + 8 < of.num_rows;
  float bias[2] = {};
  if (p.bias) {
    const float *from = p.bias + (size_t)expert * of.num_rows * (is_paired ? 2 : 1) + row;
    if (has_top) bias[0] = from[0];
    if (has_low) bias[1] = from[other];
  }
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    const int index = first + (i >> 1) * 8 + (i & 1);
    if (index >= end) continue;
    const int pair = p.pairs.order[index], token = pair / p.pairs.top_k;
    u16 *out = (u16 *)of.out + (size_t)token * of.out_stride +
               (size_t)(pair - token * p.pairs.top_k) * p.out_each + row;
    const float top = sums[i >> 1][i & 1] * of.scale.all + bias[0];
    const float low = sums[i >> 1][2 + (i & 1)] * of.scale.all + bias[1];
    const u32 both = is_paired ? pack2(swiglu(p, top, low), 0.0f) : pack2(top, low);
    if (has_top) out[0] = (u16)both;
    if (!is_paired && has_low) out[8] = (u16)(both >> 16);
  }
}

template <int F, int MT> __device__ __forceinline__ void gemm_experts(const GemmExperts &p) {
  wait_for_inputs();
  const int expert = p.pairs.tiles[blockIdx.x];
  if (expert < 0) return;
  const int first = p.pairs.tiles[p.pairs.num_tiles + blockIdx.x];
  const int end = p.pairs.tiles[2 * p.pairs.num_tiles + blockIdx.x];
  const Product &of = p.gemm.product;
  const size_t tiles = (size_t)of.num_tiles * of.num_steps;
  auto finish = [&](int place, int tile, auto &sums, auto...) {
    store_pairs<MT>(p, expert, first + place - blockIdx.x * MT * 8, end, tile, sums);
  };
  gemm_block<F, MT, 2, 0>(p.gemm, of.weight + expert * tiles * step_bytes<F>, finish);
}

#define EXPERTS(name, F, MT)                                                                      \
  extern "C" __global__ void __launch_bounds__(256, 2)                                            \
  gemm_experts_##name##_##MT(const GemmExperts p) { gemm_experts<F, MT>(p); }
EXPERTS(bfp8, BFP8, 4)
EXPERTS(bfp8, BFP8, 8)
EXPERTS(bfp8, BFP8, 16)
EXPERTS(bfp4, BFP4, 4)
EXPERTS(bfp4, BFP4, 8)
EXPERTS(bfp4, BFP4, 16)
EXPERTS(mxfp4, MXFP4, 4)
EXPERTS(mxfp4, MXFP4, 8)
EXPERTS(mxfp4, MXFP4, 16)
