// The product of 33 to 512 tokens with a weight in blocks: decoded in registers, where it already
// has the layout of the matrix unit's first operand; x whole rows of tokens from shared memory.
#pragma once

#include "tiles.cuh"

typedef unsigned long long u64;

constexpr int WIDE_WARPS = 16;               // that multiply: four groups, a row tile a warp
constexpr int CHUNK = 64, CHUNK_BYTES = 128;  // columns of x that lie together, and a token's bytes

__device__ __forceinline__ void make_barrier(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void arrive_for(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_turn(u32 at, u32 parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@done bra there;\n"
               "bra again;\n"
               "there:\n"
               "}" ::"r"(at), "r"(parity) : "memory");
}
// Whole 16 bytes, counted by a barrier of this block.
__device__ __forceinline__ void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void group_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void group_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Rows of 128 bytes, eight of them 1,024 apart, 16-byte pieces exchanged by row.
__device__ __forceinline__ u64 operand_at(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// `adds` is a predicate: the product is added to c.
#define ACC4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define ACC16(i) ACC4(i), ACC4(i + 1), ACC4(i + 2), ACC4(i + 3)
// c += 64 rows x 16 columns of a group's four row tiles times the columns of MT * 8 tokens.
__device__ __forceinline__ void multiply_group(float (&c)[8][4], u32 a0, u32 a1, u32 a2, u32 a3,
                                               u64 x) {
  asm volatile(
      "{.reg .pred adds;\nsetp.eq.u32 adds, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1, 0;}"
      : ACC16(0), ACC16(4)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x));
}
__device__ __forceinline__ void multiply_group(float (&c)[16][4], u32 a0, u32 a1, u32 a2, u32 a3,
                                               u64 x) {
  asm volatile(
      "{.reg .pred adds;\nsetp.eq.u32 adds, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, adds, 1, 1, 0;}"
      : ACC16(0), ACC16(4), ACC16(8), ACC16(12)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x));
}

// A word of codes, as decode_bfp8 and decode_bfp4 of tiles.cuh have it.
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
// Quarter `i` of a lane's tile, 32 columns: fragments of its rows g (top) and g + 8 (low), two steps
// of 16 columns.
template <int F>
__device__ __forceinline__ void decode_quarter(u32 (&top)[4], u32 (&low)[4], u32 tile16, u32 tile4,
                                               int i) {
  const u32 exponents = read4(tile4);
  const u32 e0 = scale_of(exponents, i & 2), e1 = scale_of(exponents, (i & 2) + 1);
  if (F == BFP8) {
    u32 w[2], v[2];
    read8(w, tile16 + i * 8 + (i & 2) * 504);  // a piece of each half and row
    read8(v, tile16 + i * 8 + (i & 2) * 504 + 512);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      decode_word8(top[2 * k], top[2 * k + 1], w[k], e0);
      decode_word8(low[2 * k], low[2 * k + 1], v[k], e1);
    }
  } else {
    decode_word4(top, read4(tile16 + i * 4), e0);
    decode_word4(low, read4(tile16 + i * 4 + 512), e1);
  }
}

// MT * 8 tokens of blockIdx.x, sixteen row tiles of blockIdx.z; where K is cut, the slice of
// blockIdx.y, whose eight blocks are a cluster and add up their sums as gemm.cuh does. x: what
// `arrange` made of it, `x_stride` tokens in all.
template <int F, int MT, int DEPTH> __device__ __forceinline__ void wide(const Product &p) {
  constexpr int TOKENS = MT * 8, X_HALF = TOKENS * CHUNK_BYTES, X_BYTES = 2 * X_HALF;
  constexpr int W_BYTES = WIDE_WARPS * step_bytes<F>;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[DEPTH], empty[DEPTH];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first_tile = blockIdx.z * WIDE_WARPS, tile = first_tile + warp;
  const int slice = blockIdx.y, num_slices = gridDim.y, first_token = blockIdx.x * TOKENS;
  const int first = slice * p.num_steps / num_slices, last = (slice + 1) * p.num_steps / num_slices;
  const int num_steps = last - first;
  const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + DEPTH * X_BYTES;
  const u32 is_full = shared_address(full), is_empty = shared_address(empty);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      make_barrier(is_full + 8 * i, 1);
      make_barrier(is_empty + 8 * i, WIDE_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  release_dependents();
  __syncthreads();
  // A warp's: sixteen lanes ask for a row tile each, two for a half of x.
  auto fetch_weights = [&](int step) {
    const u32 slot = step % DEPTH, barrier = is_full + 8 * slot;
    if (lane == 0) arrive_for(barrier, X_BYTES + W_BYTES);
    __syncwarp();
    if (lane >= WIDE_WARPS) return;
    const size_t own = min(first_tile + lane, p.num_tiles - 1);
    copy_bulk(w_ring + slot * W_BYTES + lane * step_bytes<F>,
              p.weight + (own * p.num_steps + first + step) * step_bytes<F>, step_bytes<F>,
              barrier);
  };
  auto fetch_x = [&](int step) {
    if (lane >= 2) return;
    const u32 slot = step % DEPTH;
    const size_t chunk = (size_t)(2 * (first + step) + lane) * p.x_stride + first_token;
    copy_bulk(x_ring + slot * X_BYTES + lane * X_HALF, (const u8 *)p.x + chunk * CHUNK_BYTES,
              X_HALF, is_full + 8 * slot);
  };
  if (warp == 0) {  // weights never change: they are asked for before x is there
    const int ahead = min(DEPTH, num_steps);
    for (int step = 0; step < ahead; ++step) fetch_weights(step);
    wait_for_inputs();
    for (int step = 0; step < ahead; ++step) fetch_x(step);
    __syncwarp();
  }
  float acc[MT][4] = {};
  const u32 tile16 = w_ring + warp * step_bytes<F> + lane * 16;
  const u32 tile4 = w_ring + warp * step_bytes<F> + pieces<F> * 512 + lane * 4;
  u32 slot = 0, parity = 0;
  for (int step = 0; step < num_steps; ++step) {
    group_wait<0>();
    if (step > 0) {  // the step before is free: warps ask for the next in its place in turn
      const u32 free = is_empty + 8 * (slot == 0 ? DEPTH - 1 : slot - 1);
      if (lane == 0) arrive(free);
      const int next = step - 1 + DEPTH;
      if (warp == (step & (WIDE_WARPS - 1)) && next < num_steps) {
        wait_turn(free, slot == 0 ? parity ^ 1 : parity);
        fetch_weights(next);
        fetch_x(next);
      }
    }
    wait_turn(is_full + 8 * slot, parity);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 top[4], low[4];
      if (i > 1) group_wait<1>();  // of the quarter before last: its fragments' registers are free
      decode_quarter<F>(top, low, tile16 + slot * W_BYTES, tile4 + slot * W_BYTES, i);
      group_fence();
      const u64 x = operand_at(x_ring + slot * X_BYTES + (i >> 1) * X_HALF) + (i & 1) * 4;
      multiply_group(acc, top[0], low[0], top[1], low[1], x);
      multiply_group(acc, top[2], low[2], top[3], low[3], x + 2);
      group_commit();
    }
    if (++slot == DEPTH) slot = 0, parity ^= 1;
  }
  group_wait<0>();
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(acc[m][i])::"memory");
  wait_for_inputs();  // what is added to may be what the kernel before writes
  if (num_slices == 1) {
    if (tile >= p.num_tiles) return;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      finish(p, first_token + m * 8 + 2 * t, tile, g, acc[m][0], acc[m][2]);
      finish(p, first_token + m * 8 + 2 * t + 1, tile, g, acc[m][1], acc[m][3]);
    }
    return;
  }
  constexpr int WIDTH = WIDE_WARPS * 16 + 8;  // of a token's partial sums
  float *partial = (float *)memory;
  __syncthreads();
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      partial[(m * 8 + 2 * t + (i & 1)) * WIDTH + warp * 16 + g + (i >> 1) * 8] = acc[m][i];
  cluster_barrier();
  constexpr int PAIRS = WIDE_WARPS * 8;
  for (int i = threadIdx.x; i < MT * PAIRS; i += blockDim.x) {
    const int token = i / PAIRS * 8 + slice, pair = i % PAIRS, owner = first_tile + (pair >> 3);
    if (first_token + token >= p.num_tokens || owner >= p.num_tiles) continue;
    const u32 at = shared_address(partial + token * WIDTH + (pair >> 3) * 16 + (pair & 7));
    float top[SLICES], low[SLICES];
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      top[s] = read_of_rank(at, s);
      low[s] = read_of_rank(at + 32, s);
    }
#pragma unroll
    for (int s = 1; s < SLICES; ++s) {
      top[0] += top[s];
      low[0] += low[s];
    }
    finish(p, first_token + token, owner, pair & 7, top[0], low[0]);
  }
  cluster_barrier();  // nobody's memory goes while another reads it
}
