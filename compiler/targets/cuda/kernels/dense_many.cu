// SwiGLU of the product of more than 128 tokens with a weight of bfloat16 rows, which lie as they
// are. Compiled by NVRTC. Blocks have 128 rows by up to 256 tokens; two are a cluster and fetch each
// other's tokens. No bit is promised.

#include "dense.cuh"

struct Many {
  TensorMap weight, x, out;  // [N, K], [M, K], [M, N / 2], in boxes of 128 bytes of a row
  Product product;           // its operands are not read
  int num_chunks;            // of 128 bytes of K
  int depth;                 // chunks in flight
  int num_blocks;            // of rows
  u64 rest[2];               // of whole 64 bytes, as maps have
};

// Into the same place of both blocks of a cluster, each of whose barriers counts its bytes.
__device__ __forceinline__ void copy_box_to_both(u32 to, const TensorMap &map, int column, int row,
                                                 u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to), "l"(&map),
      "r"(barrier), "r"(column), "r"(row), "h"((u16)3), "l"(policy) : "memory");
}
// Nothing was written that the other block reads: no scope is named, for a cluster's waits for all
// memory of the device.
__device__ __forceinline__ void arrive_at_rank(u32 at, int rank) {
  asm volatile("{.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(at), "r"(rank)
               : "memory");
}
// Four tiles of 8 rows of the weight by 8 tokens, two tokens a lane, as 8 tokens by 8 values each;
// a lane names the place of one token's values.
__device__ __forceinline__ void put_tiles(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap &map, u32 from, int column, int row) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   &map), "r"(column), "r"(row), "r"(from) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_for_groups_of_warps(int num_threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(num_threads) : "memory");
}

#define LIST96                                                                                    \
  LIST64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
         "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST112                                                                                   \
  LIST96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
         "%110, %111"
#define LIST128                                                                                   \
  LIST112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "      \
          "%125, %126, %127"
#define ACC96 ACC16(0), ACC16(4), ACC16(8), ACC16(12), ACC16(16), ACC16(20)
MULTIPLY_ROWS(24, 192, LIST96, 96, 97, 98, ACC96)
MULTIPLY_ROWS(28, 224, LIST112, 112, 113, 114, ACC96, ACC16(24))
MULTIPLY_ROWS(32, 256, LIST128, 128, 129, 130, ACC96, ACC16(24), ACC16(28))

// SwiGLU of a lane's sums, as 8 tokens by 8 values a tile, into the 128 bytes that a token has at
// `place`.
template <int MT>
__device__ __forceinline__ void put_swiglu(const Product &p, u32 place, int row,
                                           const float (&sums)[MT][4]) {
  float gate = 0.0f, up = 0.0f;
  if (p.bias && row + 8 < p.num_rows) gate = p.bias[row], up = p.bias[row + 8];
  auto value = [&](float top, float low) {
    top = top * p.scale + gate;
    return __fdividef(top, 1.0f + __expf(-top)) * (low * p.scale + up);
  };
#pragma unroll
  for (int m = 0; m < MT; m += 4) {
    u32 made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&each)[4] = sums[m + i];
      made[i] = pack2(value(each[0], each[2]), value(each[1], each[3]));
    }
    put_tiles(place + m * 1024, made[0], made[1], made[2], made[3]);
  }
}

// MT * 8 tokens a block, two groups of four warps with 64 rows each, and a warp that asks for what
// they read: its block's rows, and half of the tokens of both blocks. A cluster walks over pairs of
// blocks of rows without a gap; what a block has made leaves while it works on the next.
template <int MT> __device__ __forceinline__ void many(const Many &many) {
  constexpr u32 W_BYTES = 2 * 64 * 128, X_BYTES = MT * 8 * 128, BYTES = W_BYTES + X_BYTES;
  constexpr int TOKENS = MT * 8, THREADS = 256, WARPS = THREADS / 32;
  constexpr u64 ONCE = 0x12F0000000000000ull, OFTEN = 0x14F0000000000000ull;  // of the L2
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[MOST_CHUNKS], empty[MOST_CHUNKS];
  const Product &p = many.product;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = threadIdx.x >> 7;
  const u32 ring = (shared_address(memory) + 1023) & ~1023u, depth = many.depth;
  const u32 out = ring + depth * BYTES, at_full = shared_address(full);
  const u32 at_empty = shared_address(empty), rank = blockIdx.y & 1, num_steps = many.num_chunks;
  const u32 first = blockIdx.y & ~1u;
  const u32 turns = first < many.num_blocks
                        ? (many.num_blocks - first + gridDim.y - 1) / gridDim.y : 0;
  const u32 count = turns * num_steps;
  auto weights = [&](u32 i, u32 slot) {
    const u32 turn = i / num_steps, column = i - turn * num_steps;
    arrive_for(at_full + 8 * slot, BYTES);
    copy_box(ring + slot * BYTES, many.weight, column * 64, (blockIdx.y + turn * gridDim.y) * 128,
             at_full + 8 * slot, ONCE);
  };
  auto tokens = [&](u32 i, u32 slot) {
    copy_box_to_both(ring + slot * BYTES + W_BYTES + rank * (X_BYTES / 2), many.x,
                     i % num_steps * 64, blockIdx.x * TOKENS + rank * (TOKENS / 2),
                     at_full + 8 * slot, OFTEN);
  };
  const bool asks = warp == WARPS && lane == 0;
  const u32 ahead = min(depth, count);
  if (asks) {
    for (u32 i = 0; i < depth; ++i) {
      make_barrier(at_full + 8 * i, 1);
      make_barrier(at_empty + 8 * i, 2 * WARPS);
    }
    show_barriers();
    for (u32 i = 0; i < ahead; ++i) weights(i, i);  // which never change
  }
  release_beside(p);
  __syncwarp();
  cluster_barrier();
  if (warp == WARPS) {
    if (lane == 0) {
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
    const int column = group * 4 + (warp & 3);  // of the 16 bytes of a token's 128
    const u32 place = out + lane * 128 + ((column ^ (lane & 7)) << 4);
    float acc[MT][4];
    u32 slot = 0, parity = 0;
#pragma unroll 1
    for (u32 turn = 0; turn < turns; ++turn) {
      const u32 block = blockIdx.y + turn * gridDim.y;
      u32 before = slot;
#pragma unroll 1
      for (u32 step = 0; step < num_steps; ++step) {
        wait_turn(at_full + 8 * slot, parity);
        __syncwarp();
        const u64 w = operand_at(ring + slot * BYTES + group * 8192);
        const u64 x = operand_at(ring + slot * BYTES + W_BYTES);
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          multiply_rows<BF16>(acc, w + 2 * k, x + 2 * k, k > 0 || step > 0);
        group_commit();
        group_wait<1>();
        if (step && lane < 2) arrive_at_rank(at_empty + 8 * before, lane);
        before = slot;
        if (++slot == depth) slot = 0, parity ^= 1;
      }
      group_wait<0>();
      if (lane < 2) arrive_at_rank(at_empty + 8 * before, lane);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(acc[m][i])::"memory");
      const int row = (block * 8 + group * 4 + (warp & 3)) * 16 + (lane >> 2);
      if (threadIdx.x == 0) {
        wait_for_inputs();  // what is written may be what the kernel before reads
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      }
      wait_for_groups_of_warps(THREADS);  // what was made before has left
      put_swiglu<MT>(p, place, row, acc);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      wait_for_groups_of_warps(THREADS);
      if (threadIdx.x == 0) store_box(many.out, out, block * 64, blockIdx.x * TOKENS);
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
  }
  cluster_barrier();  // nobody's memory goes while another writes into it
}

#define MANY(MT)                                                                                  \
  extern "C" __global__ void __launch_bounds__(288, 1)                                            \
  many_##MT(const __grid_constant__ Many p) { many<MT>(p); }

MANY(24)
MANY(28)
MANY(32)
