// Matmul of bfp4 weights and e4m3 codes, for 33 to 64 tokens, and the codes for a norm. Compiled by
// NVRTC. A lane decodes weights to e4m3 in registers, as the first operand for the matrix unit. Codes
// of x come from shared memory. Requires weights that are exact in e4m3: see weights/e4m3.py. Not
// batch-invariant.

#include "gemm_bf16.cuh"
#include "gemm_block.cuh"
#include "norm.cuh"

// Two e4m3 codes, to nearest even.
__device__ __forceinline__ u32 codes2(float low, float high) {
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}
// An even column's position in x. The next column is 16 positions behind. For the order, see
// `position_of` in kernels/matmul/e4m3.py.
__device__ __forceinline__ int position_of(int column) {
  return (column & ~63) + (column >> 3 & 1) * 32 + (column >> 4 & 3) * 4 + (column >> 1 & 3);
}

struct NormCodes {
  const float *x, *norm;  // fp32 [num_tokens, x_stride] with num_columns values; [num_columns]
  u8 *codes;              // [num_tokens, codes_stride]
  float *scales;          // [num_tokens]
  int num_columns, x_stride, codes_stride;
  int is_arranged;  // codes are ordered by `position_of`
  float eps;
};

// Write a token's norm, rounded to bfloat16, as codes with a power of two. A block per token.
extern "C" __global__ void __launch_bounds__(256) norm_codes(const NormCodes p) {
  __shared__ u32 each[8];
  uint2 values[8];
  release_dependents();
  const size_t token = blockIdx.x;
  u32 largest = 0;  // float bits, ordered as the floats
  auto put = [&](int at, uint2 four) {
    values[(at - (int)threadIdx.x * 4) >> 10] = four;
    const u32 a = four.x & 0x7FFF7FFFu, b = four.y & 0x7FFF7FFFu;
    largest = max(max(largest, max(a << 16, a & 0xFFFF0000u)), max(b << 16, b & 0xFFFF0000u));
  };
  normalise_by(p.x + token * p.x_stride, p.norm, p.num_columns, p.num_columns, p.eps, put);
#pragma unroll
  for (int offset = 16; offset; offset >>= 1)
    largest = max(largest, __shfl_xor_sync(~0u, largest, offset));
  if ((threadIdx.x & 31) == 0) each[threadIdx.x >> 5] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, each[i]);
  const int field = max((int)(largest >> 23) - 7, 1);  // see weights/e4m3.py
  const float inverse = __uint_as_float((u32)(254 - field) << 23);
  if (threadIdx.x == 0)
    p.scales[token] = largest ? __uint_as_float((u32)field << 23) : 1.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = threadIdx.x * 4 + i * 1024;
    if (at >= p.num_columns) break;
    const uint2 four = values[i];
    const u32 low = codes2(__uint_as_float(four.x << 16) * inverse,
                           __uint_as_float(four.x & 0xFFFF0000u) * inverse);
    const u32 high = codes2(__uint_as_float(four.y << 16) * inverse,
                            __uint_as_float(four.y & 0xFFFF0000u) * inverse);
    u8 *codes = p.codes + token * p.codes_stride;
    if (p.is_arranged) {
      const u32 apart = __byte_perm(low, high, 0x5140);  // even columns, then odd columns
      codes += position_of(at);
      *(u16 *)codes = apart;
      *(u16 *)(codes + 16) = apart >> 16;
    } else {
      *(u32 *)(codes + at) = low | high << 16;
    }
  }
}

struct alignas(64) GemmBlockE4M3 {
  TensorMap weight;  // see GemmSplit
  TensorMap x;       // codes [M, K] ordered by `position_of`, in 128-byte boxes along K
  Product product;   // its operands are not read
  const float *weight_scales, *token_scales;  // [N] and [M], powers of two
  float scale;                             // a power of two, for the weight
  int depth;                               // steps in flight
  int tiles;                               // row tiles in a block
  int padding;
};

constexpr int EIGHTS = 8, GROUPS = 4;  // tokens in a block, divided by 8; groups of four warps
// A unit is a power of two: unit i is 2^(i - 11). Blocks with values have units from 0 to 17.
constexpr int UNITS = 32, BFP4_BIAS = 129;

template <int ADDS>
__device__ __forceinline__ void multiply_codes(float (&c)[8][4], const u32 (&a)[4], u64 x) {
  asm volatile(
      "{.reg .pred adds;\nsetp.eq.u32 adds, 1, %37;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" LIST32 "}, {%32, %33, %34, %35}, "
      "%36, adds, 1, 1;}"
      : ACC16(0), ACC16(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "n"(ADDS));
}
// Select four bytes of `a` and `b` by the low nibbles of `at`. The intrinsic would mask the nibbles,
// which have no high bit here.
__device__ __forceinline__ u32 select_bytes(u32 a, u32 b, u32 at) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(at));
  return d;
}
// Decode a word's columns to e4m3: the even columns, then the odd columns. `table`: codes for
// magnitudes in the block's unit. See packed_weight.py for the word.
__device__ __forceinline__ void decode_codes(u32 &even, u32 &odd, u32 w, const u32 (&table)[2]) {
  const u32 signs = ~w << 4 & 0x80808080u;  // for values in the low half of a byte
  const u32 ones = signs >> 7;
  // A negative value's magnitude is 8 less its code.
  const u32 at = ((w ^ ones * 7) & 0x77777777u) + ones;
  even = select_bytes(table[0], table[1], at) | (__byte_perm(signs, w, 0x4150) & 0x80808080u);
  odd = select_bytes(table[0], table[1], at >> 16) | (__byte_perm(signs, w, 0x6372) & 0x80808080u);
}
// Multiply a lane's sums by the row and token scales, and finish them. Finishing some tokens at a
// time limits the registers.
__device__ __forceinline__ void finish_codes(const GemmBlockE4M3 &args, int token, int tile, int g,
                                             const float (&sums)[EIGHTS][4]) {
  constexpr int AT_ONCE = 2;
  const Product &p = args.product;
  const int row = tile * 16 + g;
  const float top = row < p.num_rows ? args.weight_scales[row] : 0.0f;
  const float low = row + 8 < p.num_rows ? args.weight_scales[row + 8] : 0.0f;
#pragma unroll
  for (int first = 0; first < EIGHTS; first += AT_ONCE) {
    float part[AT_ONCE][4];
#pragma unroll
    for (int m = 0; m < AT_ONCE; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own = min(token + 8 * (first + m) + (i & 1), p.num_tokens - 1);
        part[m][i] = sums[first + m][i] * ((i < 2 ? top : low) * args.token_scales[own]);
      }
    finish_tile<BF16>(p, token + 8 * first, tile, g, part);
    asm volatile("" ::: "memory");
  }
}

// Multiply 64 tokens with up to 4 GROUPS row tiles per block, as `gemm_split` without a split.
extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, 1)
block_e4m3(const __grid_constant__ GemmBlockE4M3 args) {
  constexpr u32 X_BYTES = EIGHTS * 8 * 128;
  constexpr int LINES = step_bytes<BFP4> / 128;
  const Product &p = args.product;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(256) u32 tables[UNITS][2];  // codes for the magnitudes 0 to 7
  __shared__ __align__(8) u64 full[MOST_DEPTH], empty[MOST_DEPTH];
  const u32 lane = threadIdx.x & 31;
  const u32 warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), group = warp >> 2;  // uniform
  const int g = lane >> 2, t = lane & 3;
  const u32 depth = args.depth, taken = args.tiles, groups = (taken + 3) / 4;
  const u32 num_tiles = p.num_tiles, num_steps = p.num_steps;
  const u32 num_blocks = (num_tiles + taken - 1) / taken, w_bytes = taken * step_bytes<BFP4>;
  const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, codes_at = x_ring + depth * X_BYTES;
  const u32 at_full = shared_address(full), at_empty = shared_address(empty);
  auto tile_of = [&](u32 block, u32 at) { return at < taken ? block * taken + at : num_tiles; };
  if (threadIdx.x < UNITS * 4) {
    const int unit = threadIdx.x >> 2, first = (threadIdx.x & 3) * 2;
    const float scale = __uint_as_float((u32)(unit + 116) << 23);
    ((u16 *)tables)[threadIdx.x] = codes2(first * scale, (first + 1) * scale);
  }
  if (threadIdx.x == 0) open_stages(at_full, at_empty, depth, 4 * groups);
  release_beside(p);
  __syncthreads();
  if (group == GROUPS) {
    if (lane > 0) return;
    auto weights = [&](u32 block, u32 step, u32 slot) {
      arrive_for(at_full + 8 * slot, w_bytes + X_BYTES);
      copy_tiles(codes_at + slot * w_bytes, args.weight, step * LINES, block * taken,
                 at_full + 8 * slot);
    };
    auto tokens = [&](u32 step, u32 slot) {
      copy_box(x_ring + slot * X_BYTES, args.x, step * 128, 0, at_full + 8 * slot, OFTEN);
    };
    copy_stages(at_empty, depth, num_steps, num_blocks, weights, tokens);
    return;
  }
  if (group >= groups) return;
  float acc[EIGHTS][4] = {}, part[EIGHTS][4];
  u32 a[4], b[4];  // two fragments: decoded, and multiplied
  u32 w[4], v[4], exponents, units[2][2];  // words and tables for rows g and g + 8
  u32 slot = 0, parity = 0;
  const u32 own = codes_at + min(warp, taken - 1) * step_bytes<BFP4>;  // further warps repeat a tile
  const u32 table_at = shared_address(tables);
  int origin[2];  // 8 times the unit for exponent 0, of both rows
  auto begin = [&]() {
    wait_turn(at_full + 8 * slot, parity);
    __syncwarp();
    const u32 from = own + slot * w_bytes;
    read16(w, from + lane * 16);
    read16(v, from + lane * 16 + 512);
    exponents = read4(from + 1024 + lane * 4);
  };
  auto decode = [&](u32 (&to)[4], int i) {
    if (i % 2 == 0) {  // the next half's units
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const u32 e8 = i + k ? exponents >> (8 * (i + k) - 3) : exponents << 3;
        read8(units[k], table_at | ((e8 + origin[k]) & (UNITS - 1) * 8));
      }
    }
    decode_codes(to[0], to[2], w[i], units[0]);
    decode_codes(to[1], to[3], v[i], units[1]);
  };
  auto multiply = [&](auto starts, const u32 (&from)[4], u64 x) {
    group_fence();
    multiply_codes<!decltype(starts)::value>(part, from, x);
    group_commit();
  };
  constexpr Starts<true> FIRST;
  constexpr Starts<false> LATER;
#pragma unroll 1
  for (u32 block = blockIdx.y; block < num_blocks; block += gridDim.y) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto exponent_of = [](float scale) { return (int)(__float_as_uint(scale) >> 23); };
      const int row = min((int)tile_of(block, warp) * 16 + g + 8 * i, p.num_rows - 1);
      origin[i] = 8 * (exponent_of(args.scale) - exponent_of(args.weight_scales[row]) + 11 - BFP4_BIAS);
    }
    begin();
    decode(a, 0);
#pragma unroll 1
    for (u32 step = 0; step < num_steps; ++step) {
      const u64 x = operand_at(x_ring + slot * X_BYTES);
      const u32 before = slot;
      multiply(FIRST, a, x);
      decode(b, 1);
      multiply(LATER, b, x + 2);
      group_wait<1>();
      decode(a, 2);
      multiply(LATER, a, x + 4);
      group_wait<1>();
      decode(b, 3);
      multiply(LATER, b, x + 6);
      if (++slot == depth) slot = 0, parity ^= 1;
      if (step + 1 < num_steps) begin();
      group_wait<1>();
      decode(a, 0);
      group_wait<0>();
      if (lane == 0) arrive_at(at_empty + 8 * before);
      // The unit's sums have about 14 bits: add 128 columns, then add in float32.
#pragma unroll
      for (int m = 0; m < EIGHTS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          asm volatile("" : "+f"(part[m][i])::"memory");
          acc[m][i] += part[m][i];
        }
    }
    wait_for_inputs();  // the previous kernel may write the addend and the token scales
    finish_codes(args, 2 * t, tile_of(block, warp), g, acc);
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; ++i) acc[i >> 2][i & 3] = 0.0f;
  }
}
