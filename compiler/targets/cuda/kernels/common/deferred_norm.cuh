// Deferred norms. A matmul that adds to the residual also writes sums for squares, and the next
// matmul's x without the norm's factor, in bfloat16. The next matmul multiplies its sums by it.
// No kernel computes the norm.
#pragma once

#include "finish.cuh"

struct DeferredNorms {
  // After the matmul: the norm's weight [N] or null, the next x as `arrange` writes it, and sums for
  // squares [M, next_groups].
  const float *next_norm;
  u16 *next_x;
  float *next_squares;
  // Before the matmul: these sums [M, num_squares] or null.
  const float *squares;
  int next_places, next_groups, num_squares;
  float eps;
};

__device__ __forceinline__ void barrier_of_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}
// Finish 8 tokens in four warps, with early addends. Also write the next matmul's x. `sums_index`:
// index in `next_squares`.
template <int F, int GROUPS>
__device__ __forceinline__ void finish_group(const Product &p, const DeferredNorms &norms,
                                             int token, int tile,
                                             const float (&sums)[1][4],
                                             const Addends<1> &addends, int group, int sums_index) {
  static_assert(!is_coded<F>, "a scale for the whole weight");
  __shared__ float parts[GROUPS][4][8];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, thread = threadIdx.x & 127;
  if (!norms.next_norm) return finish_tile<F>(p, token, tile, g, sums, &addends);
  barrier_of_group(group);  // `parts` of an earlier unit are read
  float squares[2] = {};
  const int row = tile * 16 + g;
  const float weights[2] = {row < p.num_rows ? norms.next_norm[row] : 0.0f,
                            row + 8 < p.num_rows ? norms.next_norm[row + 8] : 0.0f};
  addends.each(p, token, tile, g, [&](int, int i, float *place) {
    const float value = addends.old[0][i] + sums[0][i] * p.scale.all;
    const int own = token + (i & 1), column = row + (i >> 1) * 8;
    const int piece = piece_of<false>(column) ^ own & 7;
    *place = value;
    squares[i & 1] = fmaf(value, value, squares[i & 1]);
    norms.next_x[((size_t)(column / CHUNK) * norms.next_places + own) * CHUNK + piece * 8 +
                 (column >> 4 & 3) * 2 + (column & 1)] = (u16)pack2(value * weights[i >> 1], 0.0f);
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int offset = 4; offset <= 16; offset <<= 1)
      squares[i] += __shfl_xor_sync(~0u, squares[i], offset);
    if (g == 0) parts[group][thread >> 5][2 * t + i] = squares[i];
  }
  barrier_of_group(group);
  const int own = token - 2 * t + thread;
  if (thread < 8 && own < p.num_tokens) {
    const float *of = &parts[group][0][thread];
    norms.next_squares[(size_t)own * norms.next_groups + sums_index] =
        of[0] + of[8] + of[16] + of[24];
  }
}

// Compute factors for TOKENS tokens from `first`, with the threads of a group.
template <int TOKENS>
__device__ __forceinline__ void read_factors(const Product &p, const DeferredNorms &norms,
                                             float *factors, int first, int group) {
  constexpr int THREADS = 128;
  constexpr int LANES = 8, LOADS = 8;  // per token, and per lane at once
  constexpr int EACH = (TOKENS * LANES + THREADS - 1) / THREADS;
  const int thread = threadIdx.x % THREADS;
  float sums[EACH] = {};
  for (int from = thread % LANES; from < norms.num_squares; from += LANES * LOADS) {
    float read[EACH][LOADS];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        const int local = (thread + i * THREADS) / LANES, at = from + j * LANES;
        const bool is_there =
            local < TOKENS && first + local < p.num_tokens && at < norms.num_squares;
        const size_t row = (size_t)(first + local) * norms.num_squares;
        read[i][j] = is_there ? norms.squares[row + at] : 0.0f;
      }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int j = 0; j < LOADS; ++j) sums[i] += read[i][j];
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int local = (thread + i * THREADS) / LANES;
#pragma unroll
    for (int offset = 1; offset < LANES; offset <<= 1)
      sums[i] += __shfl_xor_sync(~0u, sums[i], offset);
    if (thread % LANES == 0 && local < TOKENS)
      factors[local] = rsqrtf(sums[i] / p.num_columns + norms.eps);
  }
  barrier_of_group(group);
}
// Multiply a lane's sums by its tokens' factors.
template <int MT>
__device__ __forceinline__ void scale_sums(const float *factors, int t, float (&sums)[MT][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const float2 factor = *(const float2 *)(factors + 8 * m + 2 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[m][i] *= i & 1 ? factor.y : factor.x;
  }
}
