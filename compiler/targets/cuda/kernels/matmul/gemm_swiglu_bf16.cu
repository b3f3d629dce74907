// Matmul with SwiGLU for large batches and plain bfloat16 weight rows. Compiled by NVRTC. A block
// has 128 rows and up to 256 tokens, or turned, 128 tokens and up to 224 rows. A cluster has two
// blocks, which copy common operands for each other. Not batch-invariant.

#include "gemm_bf16.cuh"

struct GemmSwiGLU {
  TensorMap weight, x, out;  // [N, K], [M, K], [M, N / 2], in 128-byte boxes per row
  Product product;           // its operands are not read
  int num_chunks;            // 128 bytes of K each
  int depth;                 // chunks in flight
  int num_blocks;            // row blocks
  u64 rest[2];               // padding to the alignment of maps
};

// Copy a box to the same address in both blocks of a cluster. Each block's barrier counts its
// bytes.
__device__ __forceinline__ void copy_box_to_both(u32 to, const TensorMap &map, int column, int row,
                                                 u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to), "l"(&map),
      "r"(barrier), "r"(column), "r"(row), "h"((u16)3), "l"(policy) : "memory");
}
// Arrive without a scope, because the other block reads none of this block's writes. Cluster scope
// would wait for all device memory.
__device__ __forceinline__ void arrive_at_rank(u32 at, int rank) {
  asm volatile("{.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(at), "r"(rank)
               : "memory");
}
// Transpose and store four tiles, from 8 rows by 8 tokens to 8 tokens by 8 values. A lane has two
// tokens of each tile. Its address is for the values of a single token.
__device__ __forceinline__ void put_tiles(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap &map, u32 from, int column, int row) {
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

// Return SwiGLU for a gate and its up.
__device__ __forceinline__ float swiglu_of(const Product &p, float gate, float up, float gate_bias,
                                           float up_bias) {
  gate = gate * p.scale.all + gate_bias;
  return __fdividef(gate, 1.0f + __expf(-gate)) * (up * p.scale.all + up_bias);
}
// Store SwiGLU of a lane's sums in tiles of 8 tokens by 8 values. A token has 128 bytes at `place`.
template <int MT>
__device__ __forceinline__ void put_swiglu(const Product &p, u32 place, int row,
                                           const float (&sums)[MT][4]) {
  float gate = 0.0f, up = 0.0f;
  if (p.bias && row + 8 < p.num_rows) gate = p.bias[row], up = p.bias[row + 8];
#pragma unroll
  for (int m = 0; m < MT; m += 4) {
    u32 made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&each)[4] = sums[m + i];
      made[i] = pack2(swiglu_of(p, each[0], each[2], gate, up),
                      swiglu_of(p, each[1], each[3], gate, up));
    }
    put_tiles(place + m * 1024, made[0], made[1], made[2], made[3]);
  }
}
// Write SwiGLU for turned sums. A lane has two values per pair of tiles, for `token` and `token +
// 8`. Neighboring lanes exchange a pair, so that a lane writes adjacent values. `row`: the first
// row in the first tile.
template <int MT>
__device__ __forceinline__ void write_swiglu(const Product &p, int token, int row, int lane,
                                             const float (&sums)[MT][4]) {
  const int t = lane & 3;
  const bool is_odd = t & 1;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int m = 0; m < MT; m += 4) {
      u32 made[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float *gate = sums[m + 2 * i] + 2 * half, *up = sums[m + 2 * i + 1] + 2 * half;
        float2 gate_bias = make_float2(0.0f, 0.0f), up_bias = gate_bias;
        if (p.bias) {
          const float *bias = p.bias + min(row + (m + 2 * i) * 8 + 2 * t, p.num_rows - 10);
          gate_bias = make_float2(bias[0], bias[1]), up_bias = make_float2(bias[8], bias[9]);
        }
        made[i] = pack2(swiglu_of(p, gate[0], up[0], gate_bias.x, up_bias.x),
                        swiglu_of(p, gate[1], up[1], gate_bias.y, up_bias.y));
      }
      const u32 other = __shfl_xor_sync(~0u, is_odd ? made[0] : made[1], 1);
      const int column = (row >> 1) + m * 4 + (is_odd ? 8 : 0) + (t >> 1) * 4;
      const int to = token + 8 * half;
      if (to < p.num_tokens && column < p.num_rows / 2)
        *(uint2 *)((u16 *)p.out + (size_t)to * p.out_stride + column) =
            is_odd ? make_uint2(other, made[1]) : make_uint2(made[0], other);
    }
}

// Multiply in two groups of four warps: 64 rows and all tokens per group, or TURNED, 64 tokens
// and all rows per group. A further warp starts the copies: the block's own operand, and half the
// cluster's common operand, which is tokens or (ROWS) weight rows. A cluster processes row blocks
// without a gap. The store of a block overlaps with the next block.
template <int MT, bool TURNED, bool ROWS>
__device__ __forceinline__ void gemm_swiglu(const GemmSwiGLU &args) {
  constexpr u32 FIRST_BYTES = 128 * 128, BYTES = FIRST_BYTES + MT * 8 * 128;
  constexpr u32 BLOCK_ROWS = TURNED ? MT * 8 : 128, TOKENS = TURNED ? 128 : MT * 8;
  constexpr int THREADS = 256, WARPS = THREADS / 32;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[MOST_CHUNKS], empty[MOST_CHUNKS];
  const Product &p = args.product;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = threadIdx.x >> 7;
  const u32 ring = (shared_address(memory) + 1023) & ~1023u, depth = args.depth;
  const u32 out = ring + depth * BYTES, at_full = shared_address(full);
  const u32 at_empty = shared_address(empty), num_steps = args.num_chunks;
  const u32 rank = (ROWS ? blockIdx.x : blockIdx.y) & 1;
  const u32 first = ROWS ? blockIdx.y : blockIdx.y & ~1u;  // the cluster's first row block
  const u32 turns = first < args.num_blocks
                        ? (args.num_blocks - first + gridDim.y - 1) / gridDim.y : 0;
  const u32 count = turns * num_steps;
  auto weights = [&](u32 i, u32 slot) {
    const u32 turn = i / num_steps, column = (i - turn * num_steps) * 64;
    const u32 row = (blockIdx.y + turn * gridDim.y) * BLOCK_ROWS, barrier = at_full + 8 * slot;
    const u32 to = ring + slot * BYTES + (TURNED ? FIRST_BYTES : 0);
    arrive_for(barrier, BYTES);
    if (ROWS)
      copy_box_to_both(to + rank * (BLOCK_ROWS * 64), args.weight, column,
                       row + rank * (BLOCK_ROWS / 2), barrier, ONCE);
    else
      copy_box(to, args.weight, column, row, barrier, ONCE);
  };
  auto tokens = [&](u32 i, u32 slot) {
    const u32 column = i % num_steps * 64, token = blockIdx.x * TOKENS;
    const u32 to = ring + slot * BYTES + (TURNED ? 0 : FIRST_BYTES), barrier = at_full + 8 * slot;
    if (ROWS)
      copy_box(to, args.x, column, token, barrier, OFTEN);
    else
      copy_box_to_both(to + rank * (TOKENS * 64), args.x, column, token + rank * (TOKENS / 2),
                       barrier, OFTEN);
  };
  const bool asks = warp == WARPS && lane == 0;
  const u32 ahead = min(depth, count);
  if (asks) {
    for (u32 i = 0; i < depth; ++i) {
      make_barrier(at_full + 8 * i, 1);
      make_barrier(at_empty + 8 * i, 2 * WARPS);
    }
    show_barriers();
    if (!ROWS)
      for (u32 i = 0; i < ahead; ++i) weights(i, i);  // before the wait: weights never change
  }
  release_beside(p);
  __syncwarp();
  cluster_barrier();
  if (warp == WARPS) {
    if (lane == 0) {
      if (ROWS)  // the other block has initialized its barriers
        for (u32 i = 0; i < ahead; ++i) weights(i, i);
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
    const int column = group * 4 + (warp & 3);  // 16-byte unit in a token's 128 bytes
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
        const u64 a = operand_at(ring + slot * BYTES + group * 8192);
        const u64 b = operand_at(ring + slot * BYTES + FIRST_BYTES);
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          multiply_rows(acc, a + 2 * k, b + 2 * k, k > 0 || step > 0);
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
      if (TURNED) {
        wait_for_inputs();  // the previous kernel may read the output buffer
        write_swiglu<MT>(p, blockIdx.x * TOKENS + warp * 16 + (lane >> 2), block * BLOCK_ROWS, lane,
                         acc);
        continue;
      }
      if (threadIdx.x == 0) {
        wait_for_inputs();
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      }
      wait_for_groups_of_warps(THREADS);  // the previous block's values are stored
      put_swiglu<MT>(p, place, (block * 8 + column) * 16 + (lane >> 2), acc);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      wait_for_groups_of_warps(THREADS);
      if (threadIdx.x == 0) store_box(args.out, out, block * 64, blockIdx.x * TOKENS);
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
  }
  cluster_barrier();  // the other block may still write to this block's memory
}

#define GEMM_SWIGLU(MT)                                                                           \
  extern "C" __global__ void __launch_bounds__(288, 1)                                            \
  gemm_swiglu_##MT(const __grid_constant__ GemmSwiGLU p) { gemm_swiglu<MT, false, false>(p); }
#define TURNED(MT)                                                                                \
  extern "C" __global__ void __launch_bounds__(288, 1)                                            \
  turned_tokens_##MT(const __grid_constant__ GemmSwiGLU p) { gemm_swiglu<MT, true, false>(p); }   \
  extern "C" __global__ void __launch_bounds__(288, 1)                                            \
  turned_rows_##MT(const __grid_constant__ GemmSwiGLU p) { gemm_swiglu<MT, true, true>(p); }

GEMM_SWIGLU(24)
GEMM_SWIGLU(28)
GEMM_SWIGLU(32)
TURNED(24)
TURNED(28)
