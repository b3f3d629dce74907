// Collectives between GPUs. These are sums over ranks with residual and norm, the likeliest token
// from sharded logits, and gathers. all_reduce.cuh describes the protocol.

#include "all_reduce.cuh"

struct Reduce {
  Group group;
  const void *x;  // [rows, x_stride] fp32 or bf16. This rank's values
  const float *residual;  // [rows, sum_stride]; 0: none
  const float *norm;      // [width]; 0: none
  float *sum;  // [rows, sum_stride]; 0: not stored
  void *out;  // [rows, out_stride] bf16 or fp32, after the norm if present; 0: none
  int num_rows, width;
  int x_stride, sum_stride;
  int out_stride, is_bf16;  // is_bf16: type of out
  float eps;
  int padding;
};

__device__ __forceinline__ int cluster_blocks() {
  int n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}
__device__ __forceinline__ int cluster_block() {
  int n;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
  return n;
}
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Encodings of a 16-byte message word. A word equal to EMPTY (-0.0, or bf16 -0.0 above +0.0) is
// sent as +0.0.
struct Fp32 {
  static constexpr int N = 4;
  static __device__ __forceinline__ uint4 pack(const float (&v)[4]) {
    return make_uint4(full(__float_as_uint(v[0])), full(__float_as_uint(v[1])),
                      full(__float_as_uint(v[2])), full(__float_as_uint(v[3])));
  }
  static __device__ __forceinline__ void unpack(uint4 w, float (&v)[4]) {
    v[0] = __uint_as_float(w.x), v[1] = __uint_as_float(w.y);
    v[2] = __uint_as_float(w.z), v[3] = __uint_as_float(w.w);
  }
};
struct Bf16 {
  static constexpr int N = 8;
  static __device__ __forceinline__ u32 pair(float a, float b) { return full(pack2(a, b)); }
  static __device__ __forceinline__ uint4 pack(const float (&v)[8]) {
    return make_uint4(pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7]));
  }
  static __device__ __forceinline__ void unpack(uint4 w, float (&v)[8]) {
    const u32 pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = low(pairs[i]), v[2 * i + 1] = high(pairs[i]);
  }
};

template <int N> __device__ __forceinline__ void load(float (&v)[N], const float *from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 four = *(const float4 *)(from + i);
    v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
  }
}
__device__ __forceinline__ void load(float (&v)[8], const u16 *from) {
  Bf16::unpack(*(const uint4 *)from, v);
}
template <int N> __device__ __forceinline__ void store(float *to, const float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) *(float4 *)(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
}
template <int N> __device__ __forceinline__ void store(u16 *to, const float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4)
    *(uint2 *)(to + i) = make_uint2(pack2(v[i], v[i + 1]), pack2(v[i + 2], v[i + 3]));
}

// Sum over ranks first .. first + RANKS - 1 in a binary tree, for a thread's `num` words. `own` has
// this rank's words.
template <class Wire, int UNITS, int RANKS> struct Tree {
  static __device__ __forceinline__ void sum(const Side &side, float (&v)[UNITS][Wire::N], int first,
                                             const uint4 (&own)[UNITS], u64 at, u64 each, int num) {
    Tree<Wire, UNITS, RANKS / 2>::sum(side, v, first, own, at, each, num);
    if (first + RANKS / 2 >= side.group.count) return;
    float other[UNITS][Wire::N];
    Tree<Wire, UNITS, RANKS / 2>::sum(side, other, first + RANKS / 2, own, at, each, num);
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int i = 0; i < Wire::N; ++i) v[u][i] += other[u][i];
  }
};
template <class Wire, int UNITS> struct Tree<Wire, UNITS, 1> {
  static __device__ __forceinline__ void sum(const Side &side, float (&v)[UNITS][Wire::N], int rank,
                                             const uint4 (&own)[UNITS], u64 at, u64 each, int num) {
    uint4 words[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u) words[u] = own[u];
    const int self = side.group.rank;
    if (rank != self) side.take(words, side.part(self, rank) + at, each, num, rank);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) Wire::unpack(words[u], v[u]);
  }
};

// Return the sum over all threads' values in a row. The order depends on the launch configuration
// only. Set `again` if a row follows.
__device__ __forceinline__ float sum_of_row(float v, int num_blocks, bool again) {
  __shared__ float sums[32], total;
  __syncwarp();  // polling diverges the lanes
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(~0u, v, offset);
  if (!(threadIdx.x & 31)) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  const int num_warps = blockDim.x >> 5, lane = threadIdx.x & 31;
  v = lane < num_warps ? sums[lane] : 0.0f;
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(~0u, v, offset);
  if (num_blocks > 1) {
    if (!threadIdx.x) total = v;
    cluster_barrier();
    v = 0.0f;
    for (int i = 0; i < num_blocks; ++i) v += read_of_rank(shared_address(&total), i);
    cluster_barrier();  // all blocks must read a total before its block changes it
  } else if (again) {
    __syncthreads();  // the next row must not change the sums too early
  }
  return v;
}

// A thread's words in a row: `num` words from column `first`, `step` columns apart.
template <class Wire, class In, int UNITS> struct Rows {
  static constexpr int N = Wire::N;
  const Reduce &p;
  int first, step, num, num_blocks;
  float gains[UNITS][N];

  __device__ __forceinline__ explicit Rows(const Reduce &p) : p(p), num(0) {
    num_blocks = cluster_blocks();
    first = (cluster_block() * blockDim.x + threadIdx.x) * N;
    step = num_blocks * blockDim.x * N;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) num += first + u * step < p.width;
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      if (u < num && p.norm) load(gains[u], p.norm + first + u * step);
  }
  __device__ __forceinline__ u64 each() const { return (u64)step / N * 16; }
  __device__ __forceinline__ u64 place(int row) const {
    return ((u64)row * (p.width / N) + first / N) * 16;
  }
  // This rank's values in a row, encoded as a message.
  __device__ __forceinline__ void read(uint4 (&own)[UNITS], int row) const {
    float v[UNITS][N] = {};
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      if (u < num) load(v[u], (const In *)p.x + (size_t)row * p.x_stride + first + u * step);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) own[u] = Wire::pack(v[u]);
  }
  __device__ __forceinline__ void send(const Side &side, const uint4 (&own)[UNITS],
                                       int row) const {
    for (int next = 1; next < p.group.count; ++next) {
      const u64 to = side.part(behind(p.group, next), p.group.rank) + place(row);
#pragma unroll
      for (int u = 0; u < UNITS; ++u)
        if (u < num) put(to + u * each(), own[u]);
    }
  }
  __device__ __forceinline__ void read_residual(float (&residual)[UNITS][N], int row) const {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
      if (u < num && p.residual)
        load(residual[u], p.residual + (size_t)row * p.sum_stride + first + u * step);
  }
  // Add the peers' values and write the results for the row.
  template <int RANKS>
  __device__ __forceinline__ void finish(const Side &side, const uint4 (&own)[UNITS],
                                         const float (&residual)[UNITS][N], int row,
                                         bool again) const {
    float v[UNITS][N], square = 0.0f;
    Tree<Wire, UNITS, RANKS>::sum(side, v, 0, own, place(row), each(), num);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int i = 0; i < N; ++i) v[u][i] += residual[u][i];
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (u < num) square += v[u][i] * v[u][i];
    }
    float scale = 1.0f;
    if (p.norm) scale = rsqrtf(sum_of_row(square, num_blocks, again) / p.width + p.eps);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (u >= num) continue;
      if (p.sum) store(p.sum + (size_t)row * p.sum_stride + first + u * step, v[u]);
      if (!p.out) continue;
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (p.norm) v[u][i] *= scale * gains[u][i];
      const size_t to = (size_t)row * p.out_stride + first + u * step;
      if (p.is_bf16) store((u16 *)p.out + to, v[u]);
      else store((float *)p.out + to, v[u]);
    }
  }
};

// A block or a cluster computes a row at a time. All rows are sent before the first poll.
template <class Wire, class In, int UNITS, int RANKS>
__device__ __forceinline__ void reduce(const Reduce &p) {
  release_dependents();
  const Side side(p.group);
  const Rows<Wire, In, UNITS> rows(p);
  const int num_groups = gridDim.x / rows.num_blocks, begin = blockIdx.x / rows.num_blocks;
  const u32 words = p.num_rows * (p.width / Wire::N), all = gridDim.x * blockDim.x;
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  uint4 own[UNITS];
  float residual[UNITS][Wire::N] = {};
  wait_for_inputs();
  if (p.num_rows <= num_groups) {
    rows.read(own, begin);
    rows.send(side, own, begin);
    rows.read_residual(residual, begin);
    side.arm(words, thread, all);
    rows.template finish<RANKS>(side, own, residual, begin, false);
    return;
  }
  for (int row = begin; row < p.num_rows; row += num_groups) {
    rows.read(own, row);
    rows.send(side, own, row);
  }
  side.arm(words, thread, all);
  for (int row = begin; row < p.num_rows; row += num_groups) {
    rows.read(own, row);
    rows.read_residual(residual, row);
    rows.template finish<RANKS>(side, own, residual, row, true);
  }
}

struct Best {
  Group group;
  const long long *keys;  // [rows, keys_stride]: for ranges of this rank's columns
  const long long *ends;  // [rows, ends_stride]
  long long *tokens;      // [rows]
  long long *positions;   // [rows]; 0: none
  u8 *why;                // [rows]
  int num_rows, num_keys, keys_stride;
  int num_ends, ends_stride;
  int first;  // this rank's first column
};

__device__ __forceinline__ long long larger(long long a, long long b) { return a > b ? a : b; }

// A warp computes a row. The upper half of a key orders logits, and the lower half is 2^32 - 1
// minus the token. Neither half equals EMPTY; argmax.py makes the keys.
extern "C" __global__ void __launch_bounds__(256) choose_best(const __grid_constant__ Best p) {
  release_dependents();
  Side side(p.group);
  const int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const bool is_row = row < p.num_rows;
  wait_for_inputs();
  long long best = -0x7F900000ll * (1ll << 32) + 0xFFFFFFFFll;  // below the key of any logit
  if (is_row)
    for (int i = lane; i < p.num_keys; i += 32)
      best = larger(best, p.keys[(size_t)row * p.keys_stride + i]);
#pragma unroll
  for (int offset = 16; offset; offset >>= 1)
    best = larger(best, __shfl_xor_sync(~0u, best, offset));
  best -= p.first;
  const bool is_peer = is_row && lane < p.group.count && lane != p.group.rank;
  if (is_peer)
    put(side.part(lane, p.group.rank) + row * 8ull, make_uint2((u32)best, (u32)(best >> 32)));
  side.arm((p.num_rows + 1) / 2, blockIdx.x * 256 + threadIdx.x, gridDim.x * 256);
  if (is_peer) {
    uint2 word[1];
    side.take(word, side.part(p.group.rank, lane) + row * 8ull, 8, 1, lane);
    best = larger(best, (long long)((u64)word[0].y << 32 | word[0].x));
  }
  __syncwarp();
#pragma unroll
  for (int offset = 16; offset; offset >>= 1)
    best = larger(best, __shfl_xor_sync(~0u, best, offset));
  const long long token = 0xFFFFFFFFll - (best & 0xFFFFFFFFll), order = best >> 32;
  bool ends = false;
  if (is_row)
    for (int i = lane; i < p.num_ends; i += 32)
      ends |= p.ends[(size_t)row * p.ends_stride + i] == token;
  ends = __any_sync(~0u, ends);
  if (!is_row || lane) return;
  p.tokens[row] = token;
  p.why[row] = order > -0x7F800001ll && order < 0x7F800000ll ? ends : 2;
  if (p.positions && p.positions[row] >= 0) ++p.positions[row];
}

struct Deliver {
  Group group;
  const uint4 *x;  // this rank's words of 16 bytes
  uint4 *out;  // [count, num_words], by sender
  int num_words;  // for every sender
  // bit masks of ranks; every pair without data exchanges a zero word
  int senders, receivers, padding;
};

extern "C" __global__ void __launch_bounds__(512) deliver(const __grid_constant__ Deliver p) {
  release_dependents();
  Side side(p.group);
  const int self = p.group.rank, thread = blockIdx.x * 512 + threadIdx.x, all = gridDim.x * 512;
  wait_for_inputs();
  const bool sends = p.senders >> self & 1, receives = p.receivers >> self & 1;
  for (int next = 1; next < p.group.count; ++next) {
    const int peer = behind(p.group, next);
    const u64 to = side.part(peer, self);
    if (sends && p.receivers >> peer & 1) {
      for (int at = thread; at < p.num_words; at += all) {
        const uint4 v = p.x[at];
        put(to + at * 16ull, make_uint4(full(v.x), full(v.y), full(v.z), full(v.w)));
      }
    } else if (!thread) {
      put(to, make_uint4(0, 0, 0, 0));
    }
  }
  side.arm(p.num_words, thread, all);
  for (int next = 0; next < p.group.count; ++next) {
    const int peer = behind(p.group, next);
    const bool has_all = p.senders >> peer & 1 && receives;
    uint4 *to = p.out + (size_t)peer * p.num_words;
    const int num = has_all ? p.num_words : peer == self ? 0 : 1;
    for (int at = thread; at < num; at += all) {
      uint4 word[1];
      if (peer == self) word[0] = p.x[at];
      else side.take(word, side.part(self, peer) + at * 16ull, 16, 1, peer);
      if (has_all) to[at] = word[0];
    }
  }
}

// Runs after the last collective in a step. It must write before its dependents are released.
extern "C" __global__ void advance(u32 *state, int count) {
  wait_for_inputs();
  state[BASE] = (state[BASE] + count) % WRAP;
  __threadfence();
}

#define REDUCE(wire, in, W, I, UNITS, RANKS)                                                      \
  extern "C" __global__ void __launch_bounds__(UNITS * W::N == 16 ? 512 : 4096 / (UNITS * W::N))                             \
  reduce_##wire##_##in##_##UNITS##_##RANKS(const __grid_constant__ Reduce p) {                    \
    reduce<W, I, UNITS, RANKS>(p);                                                                \
  }
#define REDUCES(RANKS)                                                                            \
  REDUCE(fp32, fp32, Fp32, float, 1, RANKS)                                                       \
  REDUCE(fp32, fp32, Fp32, float, 2, RANKS)                                                       \
  REDUCE(fp32, fp32, Fp32, float, 4, RANKS)                                                       \
  REDUCE(bf16, fp32, Bf16, float, 1, RANKS)                                                       \
  REDUCE(bf16, fp32, Bf16, float, 2, RANKS)                                                       \
  REDUCE(bf16, bf16, Bf16, u16, 1, RANKS)                                                         \
  REDUCE(bf16, bf16, Bf16, u16, 2, RANKS)

REDUCES(2)
REDUCES(4)
REDUCES(8)
