// Matmuls for up to 64 tokens with their experts. A selected expert's weight is read once for
// up to 8 token-expert pairs, a tile (route.cu). The matrix unit adds a pair's products over
// all of K in order. A token's sum over its experts is in selection order. Bits do not
// depend on the batch. packed_weight.py describes weight layouts.
//
// Legend: B tokens, K experts for a token, pair b K + k, N tiles.

#include "experts_walk.cuh"

// 4-bit float codes need the most instructions a byte, and more warps to issue them.
template <int F> constexpr int warps = F == MXFP4 ? 16 : 8;
constexpr int SUM_WARPS = 9;  // eight experts for a token, and the shared expert
constexpr int MOST_SUMS = 4;  // in a thread: 16 of each token, for up to 64 tokens

// A warp computes a row tile of a pair tile's expert. Tiles are distributed over the device, with
// the shared expert's last.
template <int F, int DEPTH> __device__ __forceinline__ void expert_linear(const Experts &p) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 ring = shared_address(memory) + warp * DEPTH * stage_bytes<F>;
  Table table(memory + warps<F> * DEPTH * stage_bytes<F>, p);
  wait_for_inputs();
  release_dependents();  // only now: the sum of these experts reads the tiles without a wait
  table.read();
  __syncthreads();
  const int num_own = table.num_tiles() * p.own.num_row_tiles;
  const int num_units = num_own + p.num_shared_tiles() * p.shared.num_row_tiles;
  auto where = [&](int unit) {
    const bool is_shared = unit >= num_own;
    if (is_shared) unit -= num_own;
    const int each = is_shared ? p.shared.num_row_tiles : p.own.num_row_tiles, tile = unit / each;
    return Place{tile, unit - tile * each, is_shared};
  };
  auto finish = [&](Place at, const float(&acc)[4], float2 bias) {
    store_product(table, at, g, t, acc, bias);
  };
  const int unit = warp * gridDim.x + blockIdx.x;
  walk<F, DEPTH>(table, ring, unit, gridDim.x * warps<F>, num_units, where, [] {}, finish);
}

// Call `make` for a thread's sums in a block. Sum j is for a token and row `of` in the row tile.
template <class Make> __device__ __forceinline__ void each_sum(const Experts &p, Make make) {
#pragma unroll
  for (int j = 0; j < MOST_SUMS; ++j) {
    const int i = threadIdx.x + j * SUM_WARPS * 32, token = i >> 4, of = i & 15;
    const int row = blockIdx.x * 16 + of;
    if (token < p.num_tokens && row < p.own.num_rows)
      make(j, token, of, row, (Value *)p.out + (size_t)token * p.out_stride + row);
  }
}

// A block computes a row tile for all experts, and a warp computes a pair tile or a tile of the
// shared expert. Then the block adds the tokens' sums.
template <int F, int DEPTH> __device__ __forceinline__ void expert_sum(const Experts &p) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 ring = shared_address(memory) + warp * DEPTH * stage_bytes<F>;
  const int num_pairs = p.num_tokens * p.top_k;
  const int num_products = num_pairs + (p.shared.data ? p.num_tokens : 0);
  float *products = (float *)(memory + SUM_WARPS * DEPTH * stage_bytes<F>);  // [products, 16]
  float *weights = products + num_products * 16;
  Table table((u8 *)(weights + (num_pairs + 3) / 4 * 4), p);
  release_dependents();
  table.read();
  for (int i = threadIdx.x; i < num_pairs; i += SUM_WARPS * 32)
    weights[i] = __uint_as_float(read_past4(p.weights + i));
  for (int i = threadIdx.x; i < num_products * 4; i += SUM_WARPS * 32)
    ((float4 *)products)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // padding has no products
  __syncthreads();
  const int num_own = table.num_tiles();
  auto where = [&](int unit) {
    const bool is_shared = unit >= num_own;
    return Place{is_shared ? unit - num_own : unit, (int)blockIdx.x, is_shared};
  };
  auto finish = [&](Place at, const float(&acc)[4], float2 bias) {
    keep_product(table, at, products, num_pairs, g, t, acc, bias);
  };
  // Load the addends for a thread's sums long before their use.
  float before[MOST_SUMS], gates[MOST_SUMS], given[MOST_SUMS];
  auto wait = [&] {
    wait_for_inputs();
    each_sum(p, [&](int j, int token, int, int row, const Value *out) {
      before[j] = p.residual ? value_of(*out) : 0.0f;
      gates[j] = p.gate ? value_of(p.gate[(size_t)token * p.gate_stride]) : 0.0f;
      given[j] = p.given ? value_of(p.given[(size_t)token * p.given_stride + row]) : 0.0f;
    });
  };
  walk<F, DEPTH>(table, ring, warp, SUM_WARPS, num_own + p.num_shared_tiles(), where, wait,
                 finish);
  __syncthreads();
  each_sum(p, [&](int j, int token, int of, int, Value *out) {
    float total = 0.0f;
    for (int k = 0; k < p.top_k; ++k)
      total += weights[token * p.top_k + k] * products[(token * p.top_k + k) * 16 + of];
    if (p.gate) {
      const float shared = p.shared.data ? products[(num_pairs + token) * 16 + of] : given[j];
      total += __fdividef(shared, 1.0f + __expf(-gates[j]));
    }
    *out = to_value(before[j] + total);
  });
}

#define LINEAR(name, F, DEPTH)                                                                    \
  extern "C" __global__ void __launch_bounds__(warps<F> * 32, 1)                                  \
  expert_linear_##name##_##DEPTH(const Experts p) { expert_linear<F, DEPTH>(p); }
#define SUM(name, F, DEPTH)                                                                       \
  extern "C" __global__ void __launch_bounds__(SUM_WARPS * 32, 1)                                 \
  expert_sum_##name##_##DEPTH(const Experts p) { expert_sum<F, DEPTH>(p); }

LINEAR(bf16, BF16, 4)
LINEAR(bfp8, BFP8, 5)
LINEAR(bfp4, BFP4, 6)
LINEAR(mxfp4, MXFP4, 3)
SUM(bf16, BF16, 3)
SUM(bf16, BF16, 4)
SUM(bfp8, BFP8, 3)
SUM(bfp8, BFP8, 5)
SUM(bfp4, BFP4, 3)
SUM(bfp4, BFP4, 6)
SUM(mxfp4, MXFP4, 3)
