// Router for 5 to 32 tokens in one launch: logits for all experts, expert selection, and pairs
// grouped in tiles. Separate kernels would mostly wait for their predecessors; this kernel waits
// once. The results are not batch-invariant.
//
// In the single cluster, a block computes a slice of K for all weight rows, loaded before the wait.
// Then it adds the sums of all slices for some tokens.

#include "gemm_bf16.cuh"
#include "route_sort.cuh"

constexpr int BLOCKS = 8;
constexpr int GROUPS = 5, THREADS = GROUPS * 128, ROWS = GROUPS * 64;  // maximum weight rows
constexpr int MOST_STEPS = 4;  // k chunks in a block
constexpr int EACH = 8;  // logits in a lane
constexpr int PITCH = ROWS + 4;  // row stride of a token's sums: lanes in different banks

struct alignas(64) Router {
  TensorMap weight, x;  // [N, K] and [B, K], in boxes of 128 bytes along K
  Route route;  // `logits` are also stored
  int num_rows;  // weight rows; the experts' rows come first
  int num_chunks;  // chunks of 128 bytes along K
  int unused[10];  // pads to a multiple of 64 bytes for the host's mirror
};

template <int MT> __device__ __forceinline__ void router(const Router &p) {
  constexpr u32 W_BYTES = 64 * 128, X_BYTES = MT * 8 * 128;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 full[MOST_STEPS];
  __shared__ Chosen shared;
  __shared__ __align__(16) float logits[MT][ROWS];
  const int lane = threadIdx.x & 31, group = threadIdx.x >> 7, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x, groups = (p.num_rows + 63) / 64;
  const u32 ring = (shared_address(memory) + 1023) & ~1023u, bytes = groups * W_BYTES + X_BYTES;
  const int begins = rank * p.num_chunks / BLOCKS;
  const int num_steps = (rank + 1) * p.num_chunks / BLOCKS - begins;
  if (threadIdx.x == 0) {
    for (int i = 0; i < num_steps; ++i) make_barrier(shared_address(full + i), 1);
    show_barriers();
  }
  shared.clear();
  release_dependents();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < num_steps; ++i) {
      arrive_for(shared_address(full + i), bytes);
      for (int of = 0; of < groups; ++of)  // tuned with OFTEN, not with ONCE
        copy_box(ring + i * bytes + of * W_BYTES, p.weight, (begins + i) * 64, of * 64,
                 shared_address(full + i), OFTEN);
    }
  }
  wait_for_inputs();
  if (threadIdx.x == 0)
    for (int i = 0; i < num_steps; ++i)
      copy_box(ring + i * bytes + groups * W_BYTES, p.x, (begins + i) * 64, 0,
               shared_address(full + i), OFTEN);
  __syncwarp();
  float acc[MT][4] = {};
  if (group < groups) {
    for (int i = 0; i < num_steps; ++i) {
      wait_turn(shared_address(full + i), 0);
      __syncwarp();
      const u64 w = operand_at(ring + i * bytes + group * W_BYTES);
      const u64 x = operand_at(ring + i * bytes + groups * W_BYTES);
      group_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply_rows(acc, w + 2 * k, x + 2 * k, k > 0 || i > 0);
      group_commit();
      group_wait<0>();
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(acc[m][i])::"memory");
  }
  __syncthreads();  // the sums overwrite operands, which must be read
  float *sums = (float *)memory;  // [MT * 8][PITCH]
  if (group < groups) {
    const int row = group * 64 + (threadIdx.x >> 5 & 3) * 16 + g;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(8 * m + 2 * t + (i & 1)) * PITCH + row + (i & 2) * 4] = acc[m][i];
  }
  cluster_barrier();
  const Route &route = p.route;
  const int own = (route.num_tokens - rank + BLOCKS - 1) / BLOCKS;  // tokens rank, rank + 8 
  const int quads = (p.num_rows + 3) / 4;
  for (int at = threadIdx.x; at < own * quads; at += THREADS) {
    const int i = at / quads, quad = at - i * quads, token = rank + i * BLOCKS;
    const u32 from = shared_address(sums + token * PITCH + quad * 4);
    float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int s = 0; s < BLOCKS; ++s) {
      const float4 v = read4_of_rank(from, s);
      all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
    }
    *(float4 *)(logits[i] + quad * 4) = all;
    float *to = (float *)route.logits + (size_t)token * route.logits_stride + quad * 4;
    const float each[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (quad * 4 + j < p.num_rows) to[j] = each[j];
  }
  __syncthreads();
  for (int i = threadIdx.x >> 5; i < own; i += THREADS / 32)
    shared.choose_for<EACH>(route, logits[i], rank + i * BLOCKS, lane);
  cluster_barrier();  // peers must read the sums before this block ends
  if (rank == 0) shared.sort(route);
}

#define ROUTER(MT)                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                        \
  router_##MT(const __grid_constant__ Router p) { router<MT>(p); }

ROUTER(2)
ROUTER(4)
