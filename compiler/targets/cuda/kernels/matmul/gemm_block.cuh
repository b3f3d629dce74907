// Matmul of 17 to 512 tokens with a block-format weight. Weights are decoded in registers, as the
// matrix unit's first operand. It reads x from shared memory.
#pragma once

#include "deferred_norm.cuh"
#include "matrix_unit.cuh"

// Copy a multiple of 16 bytes with an L2 cache policy. A barrier in this block counts the bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier,
                                          u64 policy = USUAL) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier),
               "l"(policy) : "memory");
}
// Increment a word in this block's shared memory and return its previous value. Relaxed order is
// enough, because the ordered data has been read. A stronger order waits for all memory.
__device__ __forceinline__ u32 count_here(u32 at) {
  u32 old;
  asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(at) : "memory");
  return old;
}
// Multiply a group's four row tiles (64 rows x 16 columns) with MT * 8 tokens. `ADDS`: add to c,
// else replace c.
template <int ADDS>
__device__ __forceinline__ void multiply_group(float (&c)[4][4], u32 a0, u32 a1, u32 a2, u32 a3,
                                               u64 x) {
  asm volatile(
      "{.reg .pred adds;\nsetp.eq.u32 adds, 1, %21;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, adds, 1, 1, 0;}"
      : ACC16(0)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x), "n"(ADDS));
}
template <int ADDS>
__device__ __forceinline__ void multiply_group(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3,
                                               u64 x) {
  asm volatile(
      "{.reg .pred adds;\nsetp.eq.u32 adds, 1, %37;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1, 0;}"
      : ACC16(0), ACC16(4)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x), "n"(ADDS));
}
template <int ADDS>
__device__ __forceinline__ void multiply_group(float (&c)[16][4], u32 a0, u32 a1, u32 a2, u32 a3,
                                               u64 x) {
  asm volatile(
      "{.reg .pred adds;\nsetp.eq.u32 adds, 1, %69;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, adds, 1, 1, 0;}"
      : ACC16(0), ACC16(4), ACC16(8), ACC16(12)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x), "n"(ADDS));
}
template <int ADDS>
__device__ __forceinline__ void multiply_group(float (&c)[24][4], u32 a0, u32 a1, u32 a2, u32 a3,
                                               u64 x) {
  asm volatile(
      "{.reg .pred adds;\nsetp.eq.u32 adds, 1, %101;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
      "{%96, %97, %98, %99}, %100, adds, 1, 1, 0;}"
      : ACC16(0), ACC16(4), ACC16(8), ACC16(12), ACC16(16), ACC16(20)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x), "n"(ADDS));
}

// Decode a word as decode_bfp8 and decode_bfp4 in tiles.cuh.
__device__ __forceinline__ void decode_word8(u32 &a, u32 &b, u32 w, u32 scale) {
  a = multiply2(w & 0x807F807Fu, scale);
  b = multiply2(__byte_perm(w, 0, 0x2301) & 0x807F807Fu, scale);
}
__device__ __forceinline__ void decode_word4(u32 (&a)[4], u32 w, u32 scale) {
  const u32 offset = multiply2(scale, 0x82888288u), v = __byte_perm(w, 0, 0x2301);
  a[0] = fma2(mask_or(w, 0x000F000Fu, 0x02800280u), scale, offset);
  a[1] = multiply2(w & 0x80708070u, scale);
  a[2] = fma2(mask_or(v, 0x000F000Fu, 0x02800280u), scale, offset);
  a[3] = multiply2(v & 0x80708070u, scale);
}
// Decode quarter `i` of a lane's tile, 32 columns, from its words for rows g (w) and g + 8 (v) to
// fragments for two steps of 16 columns. The words cover half a bfp8 tile, or a whole bfp4 tile.
template <int F>
__device__ __forceinline__ void decode_quarter(u32 (&top)[4], u32 (&low)[4], const u32 (&w)[4],
                                               const u32 (&v)[4], u32 e0, u32 e1, int i) {
  if (F == BFP8) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      decode_word8(top[2 * k], top[2 * k + 1], w[2 * (i & 1) + k], e0);
      decode_word8(low[2 * k], low[2 * k + 1], v[2 * (i & 1) + k], e1);
    }
  } else if (F == MXFP4) {
    decode_word_mxfp4(top, w[i], e0);
    decode_word_mxfp4(low, v[i], e1);
  } else {
    decode_word4(top, w[i], e0);
    decode_word4(low, v[i], e1);
  }
}

struct GemmBlock {
  Product product;  // x is the output of `arrange`, with `x_stride` tokens
  int depth;        // steps in flight
};
constexpr int MOST_DEPTH = 12;

// Ring in shared memory: `depth` stages with a step's x and weights. A barrier counts the bytes of
// a stage. Only a single warp reads a row tile, so this warp also starts the copy of its next tile.
// The last warp to finish a stage starts the copy of its next x. Therefore no warp waits for a free
// stage, and no warp starts all copies.
template <int F, int MT, int G> struct Ring {
  static constexpr u32 WARPS = 4 * G, X_HALF = MT * 8 * CHUNK_BYTES, X_BYTES = 2 * X_HALF;
  static constexpr u32 W_BYTES = WARPS * step_bytes<F>;
  static constexpr int ARRIVALS = WARPS + 1;  // at a stage's barrier: for each tile, and for x
  const u8 *weight, *x;  // the warp's row tile; x of the tokens
  size_t x_chunk;
  u32 lane, num_steps, depth, x_ring, codes, full, left;  // codes: address of the warp's tile

  __device__ __forceinline__ void fetch_weights(u32 step, u32 slot) const {
    if (lane == 0) {
      arrive_for(full + 8 * slot, step_bytes<F>);
      // Blocks with further tokens read the same weights.
      copy_bulk(codes + slot * W_BYTES, weight + (size_t)step * step_bytes<F>, step_bytes<F>,
                full + 8 * slot, gridDim.x == 1 ? ONCE : USUAL);
    }
  }
  __device__ __forceinline__ void fetch_x(u32 step, u32 slot) const {  // called by a single lane
    const u32 to = x_ring + slot * X_BYTES;
    const u8 *from = x + 2 * step * x_chunk;
    arrive_for(full + 8 * slot, X_BYTES);
    copy_bulk(to, from, X_HALF, full + 8 * slot);
    copy_bulk(to + X_HALF, from + x_chunk, X_HALF, full + 8 * slot);
  }
  // Fill all stages. Weights never change, so their copies start before x is ready.
  __device__ __forceinline__ void begin(bool is_first) const {
    const u32 ahead = min(depth, num_steps);
    for (u32 i = 0; i < ahead; ++i) fetch_weights(i, i);
    if (is_first) {
      wait_for_inputs();
      if (lane == 0)
        for (u32 i = 0; i < ahead; ++i) fetch_x(i, i);
    }
    __syncwarp();
  }
  // A warp has read a step's tile.
  __device__ __forceinline__ void leave_weights(u32 step, u32 slot) const {
    __syncwarp();
    if (step + depth < num_steps) fetch_weights(step + depth, slot);
  }
  // A warp's matmuls have read a step's x.
  __device__ __forceinline__ void leave_x(u32 step, u32 slot) const {
    const u32 next = step + depth;
    if (next < num_steps && lane == 0 && (count_here(left + 4 * slot) & (WARPS - 1)) == WARPS - 1)
      fetch_x(next, slot);
    __syncwarp();
  }
};

// A lane's words in a step, with exponents or scales: half `j` of a tile with 8-bit codes, or a
// whole tile with 4-bit codes.
template <int F> struct Codes {
  u32 w[4], v[4], exponents[is_summed<F> ? 4 : F == NVFP4 ? 2 : 1];

  // `second`: the address for `second_offset`.
  __device__ __forceinline__ void begin(u32 tile16, u32 second) {
    if constexpr (F == Q40 || F == Q80) read_columns(exponents, second);
    else if constexpr (F != FP8) exponents[0] = read4(second);
    if constexpr (F == NVFP4) exponents[1] = read4(second + 32);
    read(tile16, 0);
  }
  __device__ __forceinline__ void read(u32 tile16, int j) {
    read16(w, tile16 + j * 1024);
    read16(v, tile16 + j * 1024 + 512);
  }
  // Decode quarter `i` to fragments for rows g and g + 8, in two steps of 16 columns.
  __device__ __forceinline__ void decode(u32 (&a)[2][4], int i) const {
    if constexpr (F == NVFP4) {
      decode_nvfp4(a[0], a[1], w, v, exponents, i);
    } else if constexpr (is_coded<F>) {
      decode_block<F>(a[0], a[1], w, v, F == Q40 ? i : i & 1);
    } else {
      const u32 e0 = scale_of(exponents[0], i & 2), e1 = scale_of(exponents[0], (i & 2) + 1);
      decode_quarter<F>(a[0], a[1], w, v, e0, e1, i);
    }
  }
  // Scales for quarter `i`, rows g and g + 8.
  __device__ __forceinline__ float2 scale(int i, u32 second) const {
    if constexpr (F == FP8)
      return make_float2(__uint_as_float(read4(second)), __uint_as_float(read4(second + 32)));
    else return halves(exponents[i]);
  }
};
template <int MT, int ADDS = 1>
__device__ __forceinline__ void multiply_quarter(float (&acc)[MT][4], const u32 (&a)[2][4], u64 x) {
  group_fence();
  multiply_group<ADDS>(acc, a[0][0], a[1][0], a[0][1], a[1][1], x);
  multiply_group<1>(acc, a[0][2], a[1][2], a[0][3], a[1][3], x + 2);
  group_commit();
}

template <bool VALUE> struct Starts { static constexpr bool value = VALUE; };

// Multiply MT * 8 tokens in G groups of four warps, 64 rows per group. CUT: the eight slices of K
// are divided among C blocks (a cluster along z) with CUT groups each, for the same 64 rows. Slices
// are added in order, as in gemm.cuh. `weight` replaces the address in the arguments. `finish`
// receives a lane's first token, its row tile, its sums and, with CUT > 1, its addends.
template <int F, int MT, int G, int CUT, int C = 1, class Finish>
__device__ __forceinline__ void gemm_block(const GemmBlock &args, const u8 *weight,
                                           Finish finish) {
  using R = Ring<F, MT, G>;
  constexpr int TOKENS = MT * 8, RINGS = CUT > 1 ? CUT : 1;
  constexpr int OWN = CUT ? SLICES / (CUT * C) : 1;  // slices per group
  static_assert(CUT <= 1 || (G == 1 && OWN <= 2), "a group keeps two slices at most");
  const Product &p = args.product;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[RINGS * MOST_DEPTH];
  __shared__ u32 left[RINGS * MOST_DEPTH];
  const int lane = threadIdx.x & 31, t = lane & 3;
  const u32 part = CUT > 1 ? threadIdx.x >> 7 : 0, warp = (threadIdx.x >> 5) - 4 * part;
  const u32 share = (C > 1 ? blockIdx.z * CUT : 0) + part;
  const u32 depth = args.depth;
  const u32 tile = blockIdx.y * R::WARPS + warp;
  const u32 begins = share * OWN * p.num_steps / SLICES;
  const u32 ends = CUT ? (share + 1) * OWN * p.num_steps / SLICES : p.num_steps;
  R ring;
  ring.lane = lane, ring.num_steps = ends - begins, ring.depth = depth;
  ring.x_ring = ((shared_address(memory) + 1023) & ~1023u) + part * depth * R::X_BYTES;
  ring.codes = ring.x_ring + (RINGS - part) * depth * R::X_BYTES + part * depth * R::W_BYTES +
               warp * step_bytes<F>;
  ring.full = shared_address(full + part * MOST_DEPTH);
  ring.left = shared_address(left + part * MOST_DEPTH);
  const size_t own = min((int)tile, p.num_tiles - 1);
  ring.weight = weight + (own * p.num_steps + begins) * step_bytes<F>;
  ring.x_chunk = (size_t)p.x_stride * CHUNK_BYTES;
  ring.x = (const u8 *)p.x + 2 * begins * ring.x_chunk + blockIdx.x * (TOKENS * CHUNK_BYTES);
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < RINGS * MOST_DEPTH; i += MOST_DEPTH)
      for (u32 j = 0; j < depth; ++j) {
        make_barrier(shared_address(full + i + j), R::ARRIVALS);
        left[i + j] = 0;
      }
    show_barriers();
  }
  release_beside(p);
  __syncthreads();
  ring.begin(warp == 0);
  float acc[MT][4] = {}, total[MT][4] = {};
  u32 a[2][4], b[2][4];  // fragments of two quarters: decoded, and multiplied
  float block[is_summed<F> ? MT : 1][4] = {};  // sums over a column block
  Codes<F> codes;
  u32 slot = 0, before = 0, parity = 0, step = 0;
  auto begin = [&]() {
    wait_turn(ring.full + 8 * slot, parity);
    __syncwarp();
    const u32 from = ring.codes + slot * R::W_BYTES;
    codes.begin(from + lane * 16, from + second_offset<F>(lane));
  };
  auto next = [&]() {
    ring.leave_weights(step, slot);
    before = slot;
    if (++slot == depth) slot = 0, parity ^= 1;
    if (++step < ring.num_steps) begin();
  };
  // Multiply quarter `i` of a step, from fragments `now`, while the next quarter is decoded.
  auto coded_quarter = [&](auto starts, const u32(&now)[2][4], u32(&later)[2][4], u64 x, int i) {
    constexpr bool WHOLE = F == FP8;  // a scale for all quarters
    if constexpr (is_summed<F>) {
      multiply_quarter<MT, decltype(starts)::value ? 0 : 1>(block, now, x);
      const u32 from = ring.codes + slot * R::W_BYTES;
      float2 scale;
      if (!WHOLE || i == 3) scale = codes.scale(i, from + second_offset<F>(lane));
      if (i == 3) next();
      else if (F != Q40 && i == 1) codes.read(from + lane * 16, 1);
      if (WHOLE && i) {
        group_wait<1>();
#pragma unroll
        for (int k = 0; k < 4; ++k)  // delays the decoding until these registers are free
          asm volatile("" : "+r"(codes.w[k]), "+r"(codes.v[k])::"memory");
      }
      codes.decode(later, (i + 1) & 3);
      if (WHOLE && i < 3) return;
      group_wait<0>();
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) asm volatile("" : "+f"(block[m][k])::"memory");
        add_scaled(acc[m], block[m], scale);
      }
    }
  };
  if (CUT <= 1 || ring.num_steps) begin();
  codes.decode(a, 0);
#pragma unroll 1
  for (u32 slice = 0; slice < OWN; ++slice) {
    const u32 last = CUT ? (share * OWN + slice + 1) * p.num_steps / SLICES - begins : ends;
#pragma unroll 1
    while (step < last) {
      const u64 x = operand_at(ring.x_ring + slot * R::X_BYTES), second = x + (R::X_HALF >> 4);
      if constexpr (is_summed<F>) {
        constexpr Starts<true> FIRST;
        constexpr Starts<F != FP8> LATER;
        coded_quarter(FIRST, a, b, x, 0);
        coded_quarter(LATER, b, a, x + 4, 1);
        coded_quarter(LATER, a, b, second, 2);
        coded_quarter(LATER, b, a, second + 4, 3);
        ring.leave_x(step - 1, before);
        continue;
      }
      multiply_quarter<MT>(acc, a, x);
      group_wait<1>();  // the previous step is finished, and its fragment registers are free
      codes.decode(b, 1);
      multiply_quarter<MT>(acc, b, x + 4);
      if (step) ring.leave_x(step - 1, before);
      if (F == BFP8) codes.read(ring.codes + slot * R::W_BYTES + lane * 16, 1);
      group_wait<1>();
      codes.decode(a, 2);
      multiply_quarter<MT>(acc, a, second);
      group_wait<1>();
      codes.decode(b, 3);
      multiply_quarter<MT>(acc, b, second + 4);
      next();
      group_wait<1>();
      codes.decode(a, 0);
    }
    group_wait<0>();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("" : "+f"(acc[m][i])::"memory");
        if (CUT == 1) {
          total[m][i] = slice ? total[m][i] + acc[m][i] : acc[m][i];
          acc[m][i] = 0.0f;
        } else if (CUT && OWN > 1 && slice == 0) {
          total[m][i] = acc[m][i];
          acc[m][i] = 0.0f;
        }
      }
  }
  wait_for_inputs();  // the previous kernel may write the addend
  if (CUT <= 1) {
    finish(blockIdx.x * TOKENS + 2 * t, tile, CUT ? total : acc);
    return;
  }
  // Sums by slice, then by value, then by thread in a group.
  float *sums = (float *)memory + (threadIdx.x & 127);
  __syncthreads();
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (OWN == 2) sums[((2 * part * MT + m) * 4 + i) * 128] = total[m][i];
      sums[(((OWN * part + OWN - 1) * MT + m) * 4 + i) * 128] = acc[m][i];
    }
  constexpr int EACH = MT > RINGS * C ? MT / (RINGS * C) : 1, HERE = RINGS * OWN;
  const u32 first = share * EACH;  // in units of 8 tokens
  const int token = blockIdx.x * TOKENS + first * 8 + 2 * t;
  Addends<EACH> addends;
  if (first < MT) addends.read_early(p, token, tile, lane >> 2);
  if (C > 1) cluster_barrier();
  else __syncthreads();
  float all[EACH][4];
  if (first < MT) {
#pragma unroll
    for (int m = 0; m < EACH; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *place = sums + ((first + m) * 4 + i) * 128;
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
          const float *of = place + s % HERE * MT * 4 * 128;
          const float value = C > 1 ? read_of_rank(shared_address(of), s / HERE) : *of;
          all[m][i] = s ? all[m][i] + value : value;
        }
      }
    finish(token, tile, all, &addends);
  }
  if (C > 1) {
    cluster_arrive();  // another block may still read this block's memory
    cluster_wait();
  }
}
template <int F, int MT, int G, int CUT, int C = 1>
__device__ __forceinline__ void gemm_block(const GemmBlock &args) {
  const int g = (threadIdx.x & 31) >> 2;
  auto finish = [&](int token, int tile, auto &sums, auto... early) {
    finish_tile<F>(args.product, token, tile, g, sums, early...);
  };
  gemm_block<F, MT, G, CUT, C>(args, args.product.weight, finish);
}

struct alignas(64) GemmSplit {
  TensorMap weight;  // [num_tiles, num_steps * step_bytes / 128, 128], boxes with a step of `tiles`
  Product product;   // x is the output of `arrange`, with `x_stride` tokens
  DeferredNorms norms;
  int depth;         // steps in flight
  int tiles;         // row tiles in a block
  int padding[10];
};
// Copy a step of some row tiles, evicted first from the L2 cache. Bytes past the last tile are
// zero.
__device__ __forceinline__ void copy_tiles(u32 to, const TensorMap &map, int line, int tile,
                                           u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(&map), "r"(barrier), "r"(0), "r"(line),
      "r"(tile), "l"(ONCE) : "memory");
}

// Open the barriers of `depth` stages. `num_warps` warps read a stage.
__device__ __forceinline__ void open_stages(u32 at_full, u32 at_empty, u32 depth, u32 num_warps) {
  for (u32 i = 0; i < depth; ++i) {
    make_barrier(at_full + 8 * i, 1);
    make_barrier(at_empty + 8 * i, num_warps);
  }
  show_barriers();
}
// Copy all steps of a block's row blocks in a thread. `weights` and `tokens` start the copies for a
// stage, and `weights` also announces their bytes.
template <class Weights, class Tokens>
__device__ __forceinline__ void copy_stages(u32 at_empty, u32 depth, u32 num_steps, u32 num_blocks,
                                            Weights weights, Tokens tokens) {
  // Weights never change, so their copies start before x is ready.
  const u32 ahead = min(depth, num_steps);
  for (u32 i = 0; i < ahead; ++i) weights(blockIdx.y, i, i);
  wait_for_inputs();
  for (u32 i = 0; i < ahead; ++i) tokens(i, i);
  u32 slot = ahead == depth ? 0 : ahead, parity = 0, step = ahead;
  bool is_again = ahead == depth;  // whether the slot had a stage before
  for (u32 block = blockIdx.y; block < num_blocks; block += gridDim.y, step = 0)
    for (; step < num_steps; ++step) {
      if (is_again) wait_turn(at_empty + 8 * slot, parity);
      weights(block, step, slot);
      tokens(step, slot);
      if (++slot == depth) slot = 0, parity ^= is_again, is_again = true;
    }
}

// Multiply MT * 8 tokens with up to 4 G row tiles per block. A further warp starts all copies, into
// `depth` stages with a step's x and weights. A block processes row blocks without a gap. Or a
// cluster of SPLITS blocks along z splits K, groups without tiles take steps in turn, and all sums
// are added in order. See `SplitTileConfig` for the depth.
template <int F, int MT, int G>
__device__ __forceinline__ void gemm_split(const GemmSplit &args) {
  constexpr u32 X_HALF = MT * 8 * CHUNK_BYTES, X_BYTES = 2 * X_HALF;
  constexpr int LINES = step_bytes<F> / 128, SPLITS = 2;
  const Product &p = args.product;
  const DeferredNorms &norms = args.norms;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[MOST_DEPTH], empty[MOST_DEPTH];
  __shared__ __align__(8) float factors[MT * 8];
  const u32 lane = threadIdx.x & 31;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), group = warp >> 2;  // uniform
  const int g = lane >> 2, t = lane & 3;
  const u32 depth = args.depth, taken = args.tiles, groups = (taken + 3) / 4, num_tiles = p.num_tiles;
  const u32 num_blocks = (num_tiles + taken - 1) / taken, w_bytes = taken * step_bytes<F>;
  const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, codes_at = x_ring + depth * X_BYTES;
  const u32 at_full = shared_address(full), at_empty = shared_address(empty);
  const u32 begins = blockIdx.z * p.num_steps / gridDim.z;
  const u32 num_steps = (blockIdx.z + 1) * p.num_steps / gridDim.z - begins;
  auto tile_of = [&](u32 block, u32 at) { return at < taken ? block * taken + at : num_tiles; };
  // Sets of groups. A set has all tiles, and takes every `sets`-th step.
  const u32 sets = gridDim.z > 1 ? min(G / groups, depth) : 1, set = group / groups;
  if (threadIdx.x == 0) open_stages(at_full, at_empty, depth, 4 * groups);
  release_beside(p);
  __syncthreads();
  float acc[MT][4] = {};
  const int token = blockIdx.x * (MT * 8) + 2 * t;
  if (group == G) {
    if (lane == 0) {
      const size_t x_chunk = (size_t)p.x_stride * CHUNK_BYTES;
      const u8 *x = (const u8 *)p.x + 2 * begins * x_chunk + blockIdx.x * X_HALF;
      auto weights = [&](u32 block, u32 step, u32 slot) {
        arrive_for(at_full + 8 * slot, w_bytes + X_BYTES);
        copy_tiles(codes_at + slot * w_bytes, args.weight, (begins + step) * LINES, block * taken,
                   at_full + 8 * slot);
      };
      auto tokens = [&](u32 step, u32 slot) {
        const u8 *from = x + 2 * step * x_chunk;
        const u32 to = x_ring + slot * X_BYTES;
        copy_bulk(to, from, X_HALF, at_full + 8 * slot);
        copy_bulk(to + X_HALF, from + x_chunk, X_HALF, at_full + 8 * slot);
      };
      copy_stages(at_empty, depth, num_steps, num_blocks, weights, tokens);
    }
    __syncwarp();
  } else if (set < sets) {
    if (norms.squares) {  // every group computes all factors
      wait_for_inputs();
      read_factors<MT * 8>(p, norms, factors, blockIdx.x * (MT * 8), group);
    }
    u32 a[2][4], b[2][4];  // fragments of two quarters: decoded, and multiplied
    Codes<F> codes;
    u32 slot = set, parity = 0;
    const u32 at = warp - set * groups * 4;
    const u32 own = codes_at + min(at, taken - 1) * step_bytes<F>;  // further warps repeat a tile
    auto begin = [&]() {
      wait_turn(at_full + 8 * slot, parity);
      __syncwarp();
      const u32 from = own + slot * w_bytes;
      codes.begin(from + lane * 16, from + second_offset<F>(lane));
    };
    auto leave = [&](u32 before) {
      if (lane == 0) arrive_at(at_empty + 8 * before);
    };
#pragma unroll 1
    for (u32 block = blockIdx.y; block < num_blocks; block += gridDim.y) {
      if (set < num_steps) {
        begin();
        codes.decode(a, 0);
      }
      u32 before = slot;
#pragma unroll 1
      for (u32 step = set; step < num_steps; step += sets) {
        const u64 x = operand_at(x_ring + slot * X_BYTES), second = x + (X_HALF >> 4);
        multiply_quarter<MT>(acc, a, x);
        group_wait<1>();  // the previous step is finished, and its fragment registers are free
        if (step >= sets) leave(before);
        codes.decode(b, 1);
        multiply_quarter<MT>(acc, b, x + 4);
        if (F == BFP8)
          codes.read(own + slot * w_bytes + lane * 16, 1);
        group_wait<1>();
        codes.decode(a, 2);
        multiply_quarter<MT>(acc, a, second);
        group_wait<1>();
        codes.decode(b, 3);
        multiply_quarter<MT>(acc, b, second + 4);
        before = slot;
        slot += sets;
        if (slot >= depth) slot -= depth, parity ^= 1;
        if (step + sets < num_steps) begin();
        group_wait<1>();
        codes.decode(a, 0);
      }
      group_wait<0>();
      if (set < num_steps) leave(before);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(acc[m][i])::"memory");
      if (gridDim.z > 1) break;
      wait_for_inputs();  // the previous kernel may write the addend
      if (norms.squares) scale_sums(factors, t, acc);
      finish_tile<F>(p, token, tile_of(block, at), g, acc);
#pragma unroll
      for (int i = 0; i < MT * 4; ++i) acc[i >> 2][i & 3] = 0.0f;
    }
  }
  if (gridDim.z == 1) return;
  wait_for_inputs();
  __syncthreads();
  float4 *sums = (float4 *)memory + (threadIdx.x & 127);
  if (set < sets) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
      sums[(group * MT + m) * 128] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
  }
  // A unit has a group's tiles and 8 tokens.
  constexpr int MOST = MT / SPLITS;  // per group
  const u32 units = groups * MT, last = group < G ? (blockIdx.z + 1) * units / SPLITS : 0;
  const u32 first = blockIdx.z * units / SPLITS + group;
  auto token_of = [&](u32 unit) { return token + (int)(unit % MT * 8); };
  auto tile_of_unit = [&](u32 unit) { return tile_of(blockIdx.y, unit / MT * 4 + (warp & 3)); };
  Addends<1> addends[MOST];
#pragma unroll
  for (u32 i = 0; i < MOST; ++i)
    if (first + i * G < last)
      addends[i].read_early(p, token_of(first + i * G), tile_of_unit(first + i * G), g);
  cluster_barrier();
#pragma unroll
  for (u32 i = 0; i < MOST; ++i) {
    const u32 unit = first + i * G;
    if (unit >= last) break;
    float4 of[SPLITS][G];
#pragma unroll
    for (u32 rank = 0; rank < SPLITS; ++rank)
#pragma unroll
      for (u32 s = 0; s < G; ++s)
        if (s < sets)
          of[rank][s] = read4_of_rank(shared_address(sums + (s * units + unit) * 128), rank);
    float all[1][4] = {};
#pragma unroll
    for (u32 rank = 0; rank < SPLITS; ++rank)
#pragma unroll
      for (u32 s = 0; s < G; ++s)
        if (s < sets)
          all[0][0] += of[rank][s].x, all[0][1] += of[rank][s].y, all[0][2] += of[rank][s].z,
              all[0][3] += of[rank][s].w;
    if (norms.squares) scale_sums(factors + unit % MT * 8, t, all);
    finish_group<F, G>(p, norms, token_of(unit), tile_of_unit(unit), all, addends[i], group,
                       blockIdx.y * groups + unit / MT);
  }
  cluster_arrive();  // another block may still read this block's memory
  cluster_wait();
}
#define SPLIT(name, F, MT, G)                                                                     \
  extern "C" __global__ void __launch_bounds__(G * 128 + 32, 1)                                   \
  split_##name##_##MT##_##G(const __grid_constant__ GemmSplit p) { gemm_split<F, MT, G>(p); }

// UNSPLIT: whole K, groups with different rows. CUT: groups with different slices of K.
#define UNSPLIT(name, F, MT, G, BLOCKS)                                                           \
  extern "C" __global__ void __launch_bounds__(G * 128, BLOCKS)                                   \
  gemm_block_##name##_##MT##_##G(const GemmBlock p) { gemm_block<F, MT, G, 0>(p); }
#define CUT(name, F, MT, PARTS, BLOCKS)                                                           \
  extern "C" __global__ void __launch_bounds__(PARTS * 128, BLOCKS)                               \
  cut_##name##_##MT##_##PARTS(const GemmBlock p) { gemm_block<F, MT, 1, PARTS>(p); }
// JOINED: a cluster of C blocks divides the slices.
#define JOINED(name, F, MT, C)                                                                    \
  extern "C" __global__ void __launch_bounds__(512, 1)                                            \
  joined_##name##_##MT##_##C(const GemmBlock p) { gemm_block<F, MT, 1, 4, C>(p); }
