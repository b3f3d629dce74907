// Matmul of 5 to 128 tokens with bfloat16 weight rows. The tensor copy engine loads both into shared
// memory. The matrix unit reads them there.
#pragma once

#include "finish.cuh"
#include "matrix_unit.cuh"

struct Dense {
  TensorMap weight, x;  // [N, K] and [M, K], in 128-byte boxes along K
  Product product;      // its operands are not read
  int num_chunks;       // 128 bytes of K each
  int depth;            // chunks in flight
  int num_blocks;       // row blocks
  int padding[5];       // to the alignment of maps
};
constexpr int MOST_CHUNKS = 12;

__device__ __forceinline__ void copy_box(u32 to, const TensorMap &map, int column, int row,
                                         u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row),
      "l"(policy) : "memory");
}

#define LIST8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIST16 LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST32                                                                                    \
  LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST64                                                                                    \
  LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "     \
         "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// Multiply a group's rows with N tokens over 16 columns, from shared memory, into c. `adds`: add
// to c.
#define MULTIPLY_ROWS(MT, N, LIST, W, X, A, ...)                                                  \
  __device__ __forceinline__ void multiply_rows(float (&c)[MT][4], u64 w, u64 x, u32 adds) {      \
    asm volatile("{.reg .pred adds;\nsetp.ne.u32 adds, %" #A ", 0;\n"                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, %" #W      \
                 ", %" #X ", adds, 1, 1, 0, 0;}"                                                  \
                 : __VA_ARGS__ : "l"(w), "l"(x), "r"(adds));                                      \
  }
MULTIPLY_ROWS(2, 16, LIST8, 8, 9, 10, ACC4(0), ACC4(1))
MULTIPLY_ROWS(4, 32, LIST16, 16, 17, 18, ACC16(0))
MULTIPLY_ROWS(8, 64, LIST32, 32, 33, 34, ACC16(0), ACC16(4))
MULTIPLY_ROWS(16, 128, LIST64, 64, 65, 66, ACC16(0), ACC16(4), ACC16(8), ACC16(12))

// Finish a lane's sums. Finishing `AT_ONCE` tiles at a time limits the registers.
template <int MT>
__device__ __forceinline__ void finish_sums(const Product &p, int token, int tile, int g,
                                            const float (&sums)[MT][4]) {
  constexpr int AT_ONCE = MT < 4 ? MT : MT < 16 ? 4 : 2;
#pragma unroll
  for (int first = 0; first < MT; first += AT_ONCE) {
    float part[AT_ONCE][4];
#pragma unroll
    for (int m = 0; m < AT_ONCE; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[m][i] = sums[first + m][i];
    finish_tile<BF16>(p, token + 8 * first, tile, g, part);
    asm volatile("" ::: "memory");
  }
}

// Add the sums of S slices in order, and finish this block's tokens. `tile`: the warp's row tile.
// Addends are read before the barrier of the cluster, then all sums.
template <int MT, int S>
__device__ __forceinline__ void add_slices(const Product &p, const float4 *sums, int token,
                                           int tile, bool is_group, int g) {
  constexpr int EACH = (MT + S - 1) / S;  // in units of 8 tokens
  const int first = blockIdx.z * MT / S, count = is_group ? (blockIdx.z + 1) * MT / S - first : 0;
  Addends<1> addends[EACH];
  float4 of[EACH][S];
#pragma unroll
  for (int m = 0; m < EACH; ++m)
    if (m < count && only_adds(p)) addends[m].read(p, token + 8 * (first + m), tile, g);
  cluster_barrier();
#pragma unroll
  for (int m = 0; m < EACH; ++m)
#pragma unroll
    for (int s = 0; s < S; ++s)
      if (m < count) of[m][s] = read4_of_rank(shared_address(sums + (first + m) * 128), s);
#pragma unroll
  for (int m = 0; m < EACH; ++m)
    if (m < count) {
      float all[1][4] = {};
#pragma unroll
      for (int s = 0; s < S; ++s)
        all[0][0] += of[m][s].x, all[0][1] += of[m][s].y, all[0][2] += of[m][s].z,
            all[0][3] += of[m][s].w;
      finish_tile<BF16>(p, token + 8 * (first + m), tile, g, all, &addends[m]);
    }
}

// Multiply MT * 8 tokens in G groups of four warps, 64 rows per group. A further warp starts the
// copies. A block processes row blocks without a gap. Or a cluster along z splits K, and its sums are
// added in order. The blocks of a cluster have a single group.
template <int MT, int G> __device__ __forceinline__ void dense(const Dense &dense) {
  constexpr u32 W_BYTES = G * 64 * 128, X_BYTES = MT * 8 * 128, BYTES = W_BYTES + X_BYTES;
  constexpr int TOKENS = MT * 8, COLUMNS = 64;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[MOST_CHUNKS], empty[MOST_CHUNKS];
  const int lane = threadIdx.x & 31, group = threadIdx.x >> 7, g = lane >> 2, t = lane & 3;
  const u32 ring = (shared_address(memory) + 1023) & ~1023u, depth = dense.depth;
  const u32 at_full = shared_address(full), at_empty = shared_address(empty);
  const u32 begins = blockIdx.z * dense.num_chunks / gridDim.z;
  const u32 num_steps = (blockIdx.z + 1) * dense.num_chunks / gridDim.z - begins;
  const int token = blockIdx.x * TOKENS + 2 * t;
  auto tile_of = [&](u32 block) { return (int)(block * G + group) * 4 + (threadIdx.x >> 5 & 3); };
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < depth; ++i) {
      make_barrier(at_full + 8 * i, 1);
      make_barrier(at_empty + 8 * i, 4 * G);
    }
    show_barriers();
  }
  release_beside(dense.product);
  __syncthreads();
  float acc[MT][4] = {};
  if (group == G) {
    if (lane == 0) {
      const u32 turns = (dense.num_blocks - blockIdx.y + gridDim.y - 1) / gridDim.y;
      const u32 count = turns * num_steps;
      auto weights = [&](u32 i, u32 slot) {
        const u32 turn = i / num_steps, column = begins + i - turn * num_steps;
        arrive_for(at_full + 8 * slot, BYTES);
        copy_box(ring + slot * BYTES, dense.weight, column * COLUMNS,
                 (blockIdx.y + turn * gridDim.y) * G * 64, at_full + 8 * slot, ONCE);
      };
      auto tokens = [&](u32 i, u32 slot) {
        copy_box(ring + slot * BYTES + W_BYTES, dense.x, (begins + i % num_steps) * COLUMNS,
                 blockIdx.x * TOKENS, at_full + 8 * slot, OFTEN);
      };
      const u32 ahead = min(depth, count);
      for (u32 i = 0; i < ahead; ++i) weights(i, i);  // before the wait: weights never change
      wait_for_inputs();
      for (u32 i = 0; i < ahead; ++i) tokens(i, i);
      u32 slot = 0, parity = 0;
      for (u32 i = depth; i < count; ++i) {
        wait_turn(at_empty + 8 * slot, parity);
        weights(i, slot);
        tokens(i, slot);
        if (++slot == depth) slot = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    u32 slot = 0, parity = 0;
#pragma unroll 1
    for (u32 block = blockIdx.y; block < dense.num_blocks; block += gridDim.y) {
      u32 before = slot;
#pragma unroll 1
      for (u32 step = 0; step < num_steps; ++step) {
        wait_turn(at_full + 8 * slot, parity);
        __syncwarp();
        const u64 w = operand_at(ring + slot * BYTES + group * 8192);
        const u64 x = operand_at(ring + slot * BYTES + W_BYTES);
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply_rows(acc, w + 2 * k, x + 2 * k, k > 0 || step > 0);
        group_commit();
        group_wait<1>();
        if (step && lane == 0) arrive_at(at_empty + 8 * before);
        before = slot;
        if (++slot == depth) slot = 0, parity ^= 1;
      }
      group_wait<0>();
      if (lane == 0) arrive_at(at_empty + 8 * before);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(acc[m][i])::"memory");
      if (gridDim.z > 1) break;
      wait_for_inputs();  // the previous kernel may write the addend
      finish_sums(dense.product, token, tile_of(block), g, acc);
    }
  }
  if (G > 1 || gridDim.z == 1) return;
  wait_for_inputs();
  __syncthreads();
  float4 *sums = (float4 *)memory + (threadIdx.x & 127);
  if (group == 0) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
      sums[m * 128] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
  }
  const int tile = tile_of(blockIdx.y);
  if (gridDim.z == 2) add_slices<MT, 2>(dense.product, sums, token, tile, group == 0, g);
  else if (gridDim.z == 4) add_slices<MT, 4>(dense.product, sums, token, tile, group == 0, g);
  else add_slices<MT, 8>(dense.product, sums, token, tile, group == 0, g);
  cluster_arrive();  // another block may still read this block's memory
  cluster_wait();
}
