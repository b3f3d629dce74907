// Expert matmuls for one or two tokens, with the bits of experts.cu. Small steps wait for memory,
// and this kernel has more loads in flight. All of x is in shared memory, and weights use the
// remaining space. The shared expert needs no router, and its weight is loaded before the wait. A
// block of the sum fits next to a block of the matmul and loads its weights concurrently. Loops are
// rolled, because fetching an instruction takes longer than its single run. packed_weight.py
// describes weight layouts.
//
// Legend: B tokens, K experts for a token, N tiles (up to 32), C columns.

#include "experts_walk.cuh"
#include "route_choose.cuh"

// With eleven, a warp computes a single row tile for a token of gpt-oss on 132 multiprocessors.
template <int F> constexpr int warps = F == MXFP4 ? 11 : 5;
constexpr int SUM_WARPS = 9;
constexpr int MAX_TILES = 32, EACH = 8;  // logits in a lane

// For a single token, `route` may select the experts in this kernel: recomputing is faster than
// waiting for a peer. `route.logits` is null if the tiles are complete.
struct MoeSmall {
  Experts of;
  Route route;
};

// Read the maximum tile count with one warp, without a wait for their count.
__device__ __forceinline__ void read_small(Table &table, const Experts &p, int lane) {
  const int count = (int)read_past4(p.tiles);
  if (lane < p.most_tiles) {
    const uint4 pairs = read_past16((const uint4 *)p.pairs + lane);
    const u32 expert = read_past4(p.tiles + 1 + lane);
    ((uint4 *)table.pairs)[lane] = pairs;
    table.tiles[1 + lane] = (int)expert;
  }
  if (lane == 0) table.tiles[0] = min(count, p.most_tiles);
}
template <bool WEIGHS>
__device__ __forceinline__ void find_small(Table &table, const Route &route, float *weights,
                                           int lane) {
  if (route.logits)
    choose_one<EACH, true, WEIGHS>(route, lane, weights, nullptr, table.tiles, table.pairs);
  else {
    read_small(table, table.p, lane);
    const int num_pairs = table.p.num_tokens * table.p.top_k;
    if (WEIGHS && lane < num_pairs)
      weights[lane] = __uint_as_float(read_past4(table.p.weights + lane));
  }
}

// Process a warp's units `first`, `first` + `stride`, ... The weights of the first `early` units
// are loaded immediately. `ready` runs once, waits for x and tiles, and returns the number of
// units. `row` returns an index into x in shared memory, from `x_rows`. See `walk` for `where` and
// `finish`.
template <int F, int DEPTH, class Where, class Ready, class Row, class Finish>
__device__ __forceinline__ void walk_small(const Table &table, u32 ring, int first, int stride,
                                           int early, u32 x_rows, int x_row, Where where,
                                           Ready ready, Row row, Finish finish) {
  constexpr int STAGE = step_bytes<F>;
  const Experts &p = table.p;
  const int lane = threadIdx.x & 31;
  Source<F> weights(p.own.data, p.own.num_steps, 0, 0, lane);
  const u32 to = ring + weights.to, to4 = ring + weights.to4;
  int num_units = early, weight_unit = first, weight_left = 0;
  Place next = where(first);
  auto fetch = [&](u32 place) {
    if (weight_unit < num_units) {
      if (weight_left == 0) {
        const Weight &of = table.weight(next);
        const int rows_before = next.is_shared ? 0 : table.expert(next.tile) * of.num_row_tiles;
        const Source<F> unit(of.data, of.num_steps, rows_before + next.row_tile, 0, lane);
        weights.a = unit.a, weights.b = unit.b;
        weight_left = of.num_steps;
      }
      weights.fetch(to + place, to4 + place);
      if (--weight_left == 0) {
        weight_unit += stride;
        next = where(weight_unit);
      }
    }
    commit();
  };
  bool is_ready = false;
#pragma unroll 1
  for (u32 place = 0; place <= DEPTH * STAGE; place += STAGE) {
    if (!is_ready && (place == DEPTH * STAGE || weight_unit >= num_units)) {
      num_units = ready();
      is_ready = true;
    }
    if (place < DEPTH * STAGE) fetch(place);
  }
  const u32 from = ring + weight_offset<F>(lane), from4 = F == BF16 ? from ^ 32 : to4;
  u32 place = 0;
#pragma unroll 1
  for (int unit = first; unit < num_units; unit += stride) {
    const Place at = where(unit);
    const int member = table.member(at, F == BF16 ? lane & 7 : lane >> 2);
    const int there = __shfl_sync(~0u, member, 0);  // padding reads a row that belongs to this warp
    u32 x = x_rows + row(at, member < 0 ? there : member) * x_row + x_offset<F>(lane, 0);
    const int num_steps = table.weight(at).num_steps;
    const float2 bias = table.biases(at, lane >> 2);
    float acc[1][1][4] = {};
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
      wait_copies<DEPTH - 1>();
      if (F == BF16) __syncwarp();  // lanes read data copied by their peers
      multiply_tiles<F, 1, 1>(acc, from + place, from4 + place, x, 0);
      if (F == BF16 || F == MXFP4) __syncwarp();  // lanes share copies, or exponents
      fetch(place);
      place = place == (DEPTH - 1) * STAGE ? 0 : place + STAGE;
      x += STEP * 2;
    }
    finish(at, acc[0][0], bias);
  }
}

// A warp computes a row tile for a pair tile's expert. Tiles are distributed over the device, with
// the shared expert's first.
template <int F, int DEPTH> __device__ __forceinline__ void linear_small(const MoeSmall &args) {
  const Experts &p = args.of;
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 ring = shared_address(memory) + warp * DEPTH * step_bytes<F>;
  u8 *x_rows = memory + warps<F> * DEPTH * step_bytes<F>;
  const int x_row = (p.own.num_steps * STEP + X_PADDING) * 2;
  Table table(x_rows + p.num_tokens * x_row, p);
  const int num_shared = p.shared.data ? p.shared.num_row_tiles : 0;
  const int num_chunks = p.own.num_steps * 16 - p.own.missing;
  auto where = [&](int unit) {
    const bool is_shared = unit < num_shared;
    if (!is_shared) unit -= num_shared;
    const int tile = is_shared ? 0 : unit / p.own.num_row_tiles;
    return Place{tile, unit - tile * p.own.num_row_tiles, is_shared};
  };
  auto ready = [&] {
    wait_for_inputs();
    release_dependents();  // only now: the sum of these experts reads tiles without a wait
    if (warp == 0)  // warp 0 waits for no copies, because weight copies precede them
      find_small<false>(table, args.route, nullptr, lane);
    else
      for (int token = 0; token < p.num_tokens; ++token)
#pragma unroll 1
        for (int at = threadIdx.x - 32; at < p.own.num_steps * 16; at += (warps<F> - 1) * 32)
          copy16_or_zero(shared_address(x_rows) + token * x_row + at * 16,
                         p.x + (size_t)token * p.x_stride + at * 8, at < num_chunks);
    if (warp) {
      commit();
      wait_copies<0>();
    }
    __syncthreads();
    return num_shared + table.num_tiles() * p.own.num_row_tiles;
  };
  auto row = [&](Place at, int member) {
    return at.is_shared ? min(member, p.num_tokens - 1) : member * p.reciprocal >> 16;
  };
  auto finish = [&](Place at, const float(&acc)[4], float2 bias) {
    store_product(table, at, g, t, acc, bias);
  };
  walk_small<F, DEPTH>(table, ring, warp * gridDim.x + blockIdx.x, gridDim.x * warps<F>, num_shared,
                       shared_address(x_rows), x_row, where, ready, row, finish);
}

// A block computes a row tile for all experts, and a warp computes a pair tile or the tile of the
// shared expert. Then the block adds the tokens' sums.
template <int F, int DEPTH> __device__ __forceinline__ void sum_small(const MoeSmall &args) {
  const Experts &p = args.of;
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 ring = shared_address(memory) + warp * DEPTH * step_bytes<F>;
  u8 *x_rows = memory + SUM_WARPS * DEPTH * step_bytes<F>;
  const int num_pairs = p.num_tokens * p.top_k;
  const int num_products = num_pairs + (p.shared.data ? p.num_tokens : 0);
  const int x_row = (max(p.own.num_steps, p.shared.num_steps) * STEP + X_PADDING) * 2;
  float *products = (float *)(x_rows + num_products * x_row);  // [products, 16]
  float *weights = products + num_products * 16;
  Table table((u8 *)(weights + MAX_TILES), p);
  release_dependents();
  if (warp == 0) find_small<true>(table, args.route, weights, lane);
#pragma unroll 1
  for (int i = threadIdx.x; i < num_products * 4; i += SUM_WARPS * 32)
    ((float4 *)products)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // padding has no products
  const int token = threadIdx.x >> 4, of = threadIdx.x & 15, out_row = blockIdx.x * 16 + of;
  const bool is_out = token < p.num_tokens && out_row < p.own.num_rows;
  float *out = (float *)p.out + (size_t)token * p.out_stride + out_row;
  float before = 0.0f, gate = 0.0f;  // complete, like the tiles
  if (is_out && p.residual) before = __uint_as_float(read_past4(out));
  if (is_out && p.gate)
    gate = __uint_as_float(read_past4((const float *)p.gate + (size_t)token * p.gate_stride));
  __syncthreads();
  const int num_own = table.num_tiles(), num_units = num_own + (p.shared.data ? 1 : 0);
  auto where = [&](int unit) {
    const bool is_shared = unit >= num_own;
    return Place{is_shared ? 0 : unit, (int)blockIdx.x, is_shared};
  };
  auto row = [&](Place at, int member) {
    return at.is_shared ? num_pairs + min(member, p.num_tokens - 1) : member;
  };
  // a pair has a single tile, so the copies of a warp have no readers in its peers
  auto ready = [&] {
    wait_for_inputs();
#pragma unroll 1
    for (int unit = warp; unit < num_units; unit += SUM_WARPS) {
      const Place at = where(unit);
#pragma unroll 1
      for (int i = 0; i < PAIRS; ++i) {
        const int member = table.member(at, i);
        if (member < 0) break;
        const u16 *x = at.is_shared ? p.shared_x + (size_t)member * p.shared_x_stride
                                    : p.x + p.row_of(member, p.x_stride, p.x_each);
        const u32 to = shared_address(x_rows) + row(at, member) * x_row;
#pragma unroll 1
        for (int j = lane; j < table.weight(at).num_steps * 16; j += 32)
          copy16_or_zero(to + j * 16, x + j * 8,
                         j < table.weight(at).num_steps * 16 - table.weight(at).missing);
      }
    }
    commit();
    wait_copies<0>();
    __syncwarp();
    return num_units;
  };
  auto finish = [&](Place at, const float(&acc)[4], float2 bias) {
    keep_product(table, at, products, num_pairs, g, t, acc, bias);
  };
  walk_small<F, DEPTH>(table, ring, warp, SUM_WARPS, num_units, shared_address(x_rows), x_row,
                       where, ready, row, finish);
  __syncthreads();
  if (!is_out) return;
  float total = 0.0f;
#pragma unroll 4
  for (int k = 0; k < p.top_k; ++k)
    total += weights[token * p.top_k + k] * products[(token * p.top_k + k) * 16 + of];
  if (p.gate) total += __fdividef(products[(num_pairs + token) * 16 + of], 1.0f + __expf(-gate));
  *out = before + total;
}

#define LINEAR(name, F, DEPTH)                                                                    \
  extern "C" __global__ void __launch_bounds__(warps<F> * 32, 1)                                  \
  expert_linear_small_##name##_##DEPTH(const MoeSmall p) { linear_small<F, DEPTH>(p); }
#define SUM(name, F, DEPTH)                                                                       \
  extern "C" __global__ void __launch_bounds__(SUM_WARPS * 32, 1)                                 \
  expert_sum_small_##name##_##DEPTH(const MoeSmall p) { sum_small<F, DEPTH>(p); }

LINEAR(bf16, BF16, 4)
LINEAR(bfp8, BFP8, 12)
LINEAR(bfp4, BFP4, 12)
LINEAR(mxfp4, MXFP4, 8)
SUM(bf16, BF16, 2)
SUM(bfp8, BFP8, 4)
SUM(bfp4, BFP4, 4)
SUM(mxfp4, MXFP4, 4)
