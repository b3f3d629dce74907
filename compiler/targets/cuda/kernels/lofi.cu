// Products of bfp4 weights with x in e4m3: a weight's codes become e4m3 in registers, where they
// are the first operand of the matrix unit; x by copies. lofi_tiles.py says how a weight lies.
// Sums go on in float32 every 128 columns: the matrix unit's own have fewer bits.

#include "wide.cuh"

struct Lofi {
  Wide wide;                 // x: what `arrange_lofi` made of it
  const float *row_scales;   // [tiles * 16]: powers of two
  const float *token_scales; // [tokens]
};

struct ArrangeLofi {
  const u16 *x;   // bf16 [tokens, x_stride], of which num_columns count
  u8 *out;        // [steps, places, 128 bytes]
  float *scales;  // [tokens]
  int num_places, num_columns, x_stride, padded;
};

__device__ __forceinline__ float widened(u32 two, int i) {
  return __uint_as_float(i ? two & 0xFFFF0000u : two << 16);
}
__device__ __forceinline__ u32 round4(float a, float b, float c, float d) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return (u32)high << 16 | low;
}

// A token's x times a power of two that makes its largest value one of [128, 256), a block a token:
// 128 columns together, in the order of a lane's fragments: column 64 h + 16 t + 8 q + 4 b + e at
// 64 h + 32 q + 16 b + 4 t + e; pieces of 16 bytes exchanged by token.
extern "C" __global__ void __launch_bounds__(256) arrange_lofi(const ArrangeLofi p) {
  __shared__ float most[8];
  release_dependents();
  wait_for_inputs();
  const int place = blockIdx.x;
  const u16 *x = p.x + (size_t)place * p.x_stride;
  float largest = 0.0f;
  for (int at = threadIdx.x * 4; at < p.num_columns; at += 1024) {
    const uint2 four = *(const uint2 *)(x + at);
    largest = fmaxf(largest, fmaxf(fabsf(widened(four.x, 0)), fabsf(widened(four.x, 1))));
    largest = fmaxf(largest, fmaxf(fabsf(widened(four.y, 0)), fabsf(widened(four.y, 1))));
  }
#pragma unroll
  for (int offset = 16; offset; offset >>= 1)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
  if ((threadIdx.x & 31) == 0) most[threadIdx.x >> 5] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, most[i]);
  const int field = max((int)(__float_as_uint(largest) >> 23) - 7, 1);
  const float inverse = __uint_as_float((u32)(254 - field) << 23);
  if (threadIdx.x == 0)
    p.scales[place] = largest > 0.0f ? __uint_as_float((u32)field << 23) : 1.0f;
  for (int at = threadIdx.x * 4; at < p.padded; at += 1024) {
    const uint2 four = at < p.num_columns ? *(const uint2 *)(x + at) : make_uint2(0, 0);
    const int t = at >> 4 & 3, piece = (at >> 4 & 4) | (at >> 2 & 3);
    u8 *to = p.out + ((size_t)(at / STEP) * p.num_places + place) * CHUNK_BYTES;
    *(u32 *)(to + (piece ^ (place & 7)) * 16 + t * 4) =
        round4(widened(four.x, 0) * inverse, widened(four.x, 1) * inverse,
               widened(four.y, 0) * inverse, widened(four.y, 1) * inverse);
  }
}

// c (+)= 64 rows x 32 columns of a group's four row tiles times the columns of MT * 8 tokens.
#define LOFI_OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(adds)
__device__ __forceinline__ void multiply_lofi(float (&c)[4][4], const u32 (&a)[4], u64 x,
                                              u32 adds) {
  asm volatile(
      "{.reg .pred adds;\nsetp.ne.u32 adds, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, adds, 1, 1;}"
      : ACC16(0) : LOFI_OPERANDS);
}
__device__ __forceinline__ void multiply_lofi(float (&c)[8][4], const u32 (&a)[4], u64 x,
                                              u32 adds) {
  asm volatile(
      "{.reg .pred adds;\nsetp.ne.u32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1;}"
      : ACC16(0), ACC16(4) : LOFI_OPERANDS);
}

// Codes of e4m3 for magnitudes 0 .. 7 times 2^(i - 9), a byte each.
__device__ __forceinline__ u64 codes_of(int i) {
  u64 found = 0;
  for (int m = 1; m < 8; ++m) {
    const int n = m << i, p = 31 - __clz(n);
    const u32 code = p < 3 ? n : (u32)(p - 2) << 3 | (n >> (p - 3) & 7);
    found |= (u64)code << (8 * m);
  }
  return found;
}
// Eight values of a word: four and four, by a table of their magnitudes and their signs.
__device__ __forceinline__ void decode_lofi(u32 &a, u32 &b, u32 w, const u32 (&table)[2]) {
  const u32 magnitudes = w & 0x77777777u;
  a = __byte_perm(table[0], table[1], magnitudes) | (w & 0x80808080u);
  b = __byte_perm(table[0], table[1], magnitudes >> 16) | (w << 4 & 0x80808080u);
}

// MT * 8 tokens by G groups of four warps with 64 rows each, of a whole K.
template <int MT, int G> __device__ __forceinline__ void lofi(const Lofi &lofi) {
  using R = Ring<LOFI, MT, G>;
  constexpr int TOKENS = MT * 8;
  const Wide &wide = lofi.wide;
  const Product &p = wide.product;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[MOST_DEPTH];
  __shared__ u32 left[MOST_DEPTH];
  __shared__ __align__(128) u64 tables[16];  // in all banks once: no two indices wait
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 warp = threadIdx.x >> 5, depth = wide.depth, tile = blockIdx.y * R::WARPS + warp;
  R ring;
  ring.lane = lane, ring.num_steps = p.num_steps, ring.depth = depth;
  ring.x_ring = (shared_address(memory) + 1023) & ~1023u;
  ring.w_ring = ring.x_ring + depth * R::X_BYTES;
  ring.full = shared_address(full), ring.left = shared_address(left);
  const size_t own = min((int)(blockIdx.y * R::WARPS + lane), p.num_tiles - 1);
  ring.weight = p.weight + own * p.num_steps * step_bytes<LOFI>;
  ring.x_chunk = (size_t)p.x_stride * CHUNK_BYTES;
  ring.x = (const u8 *)p.x + blockIdx.x * (TOKENS * CHUNK_BYTES);
  if (threadIdx.x < 16) tables[threadIdx.x] = codes_of(threadIdx.x);
  if (threadIdx.x == 0) {
    for (u32 j = 0; j < depth; ++j) {
      make_barrier(ring.full + 8 * j, 1);
      left[j] = 0;
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  release_dependents();
  __syncthreads();
  if (warp == 0) ring.begin();
  float acc[MT][4] = {}, total[MT][4] = {};
  const u32 codes_at = ring.w_ring + warp * step_bytes<LOFI>, tables_at = shared_address(tables);
  u32 slot = 0, parity = 0;
#pragma unroll 1
  for (u32 step = 0; step < ring.num_steps; ++step) {
    wait_turn(ring.full + 8 * slot, parity);
    __syncwarp();
    const u32 from = codes_at + slot * R::W_BYTES;
    const u32 indices = read4(from + pieces<LOFI> * 512 + lane * 4);
    u32 w[4], v[4], a[4][4];
    read16(w, from + lane * 16);
    read16(v, from + 512 + lane * 16);
    const u64 x = operand_at(ring.x_ring + slot * R::X_BYTES);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 top[2], low[2];
      read8(top, tables_at + 8 * (indices >> 16 * half & 0xFF));
      read8(low, tables_at + 8 * (indices >> (16 * half + 8) & 0xFF));
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        decode_lofi(a[i][0], a[i][2], w[i], top);
        decode_lofi(a[i][1], a[i][3], v[i], low);
        group_fence();
        multiply_lofi(acc, a[i], x + 2 * i, i > 0);
        group_commit();
      }
    }
    group_wait<0>();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("" : "+f"(acc[m][i])::"memory");
        total[m][i] += acc[m][i];
      }
    ring.leave(step, slot);
    if (++slot == depth) slot = 0, parity ^= 1;
  }
  wait_for_inputs();  // what is added to may be what the kernel before writes
  if ((int)tile >= p.num_tiles) return;
  const float scales[2] = {lofi.row_scales[tile * 16 + g], lofi.row_scales[tile * 16 + g + 8]};
  const int first = blockIdx.x * TOKENS + 2 * t;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first + 8 * m + (i & 1);
      total[m][i] *= token < p.num_tokens ? lofi.token_scales[token] * scales[i >> 1] : 0.0f;
    }
  finish_tile<MT>(wide, first, tile, g, total);
}

#define LOFI_KERNEL(MT, G, BLOCKS)                                                                 \
  extern "C" __global__ void __launch_bounds__(G * 128, BLOCKS)                                   \
  lofi_##MT##_##G(const Lofi p) { lofi<MT, G>(p); }

LOFI_KERNEL(4, 2, 2)
LOFI_KERNEL(8, 2, 2)
LOFI_KERNEL(8, 4, 1)
