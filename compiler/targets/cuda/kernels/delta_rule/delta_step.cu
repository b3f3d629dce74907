// Linear attention for one token in one launch: convolution with SiLU and its window, unit vectors,
// gates, the gated delta rule state, and the gated norm of heads.
//
// A block has COLS state columns for a row and a value head. The value heads of a row with the same
// key head form a cluster. A block convolves its own values and its share of the q and k channels,
// and sends them to the cluster. A window therefore has a single reader, which moves it. The blocks
// of a head exchange the sums of squares for the norm. All sums have a fixed order, and a row has
// the same bits in every batch.
//
// With k and q of length 1 and the decayed state S: S' = S + k w and w = (v - k S) beta. The result
// is q S' = q S + (q k) w. Therefore a single pass over the state computes both products.

#include "attention_primitives.cuh"
#include "delta_gates.cuh"

constexpr int MOST_BLOCKS = 8;  // of a cluster
constexpr int MOST_KEPT = 3;    // values of a channel's window
constexpr int SKIPPED = -2;     // position of a row that another launch computes

struct DeltaStep {
  const Value *x;  // [B, 2 G D + H D], row stride `x_stride`
  const float *weight;              // [2 G D + H D, width]
  float *window;                    // [S, 2 G D + H D, width - 1]
  const Value *a, *b;               // [B, H]
  const float *a_log, *dt_bias;     // [H]
  const Value *z;                   // [B, H D]
  const float *norm;                // [D]
  float *state;                     // [S, H, D, D]
  u16 *out;                         // bf16 [B, H D]
  const i64 *positions, *slots, *targets;  // [B]; targets: where window and state are kept
  int x_stride, a_stride, b_stride, z_stride, out_stride;
  int num_heads, num_key_heads, width, early;
  int num_blocks, share;  // blocks in a cluster; q and k channels for a block, in fours
  int streams;  // bypass caches for the state: see read_stream
  float eps;
};

template <int D, int COLS> struct Shared {
  static constexpr int WARPS = COLS / 8;
  float q[D], k[D];  // convolved, before normalization; received from the cluster
  float own[4 * COLS];  // this block's q and k channels, by thread
  float v[COLS], gate[COLS];  // gate: the norm's weight times silu of z
  float sums[2][WARPS][COLS];  // by warp: k S and q S before decay
  float squares[MOST_BLOCKS];  // by block of the head
  float decay, beta, q_factor, k_factor, dot;
  unsigned long long received, squared;  // mbarriers for q and k, and for squares
};

// Read a constant that kernels never write. The asm prevents a move after the wait.
__device__ __forceinline__ float read_constant(const float *from) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
// Send to the same address in a block of the cluster. Its barrier counts the bytes.
__device__ __forceinline__ void send_to(int rank, float4 *to, float4 v, void *barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(in_block(to, rank)),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(in_block(barrier, rank)) : "memory");
}
__device__ __forceinline__ void send_to(int rank, float *to, float v, void *barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   in_block(to, rank)), "f"(v), "r"(in_block(barrier, rank)) : "memory");
}
// Read data that this step does not need again: no allocation in L1 and early eviction from L2. L1
// must not have a stale line of an earlier kernel. This holds because the prefill kernels, which
// read state otherwise, precede an early read by a whole graph launch.
__device__ __forceinline__ float4 read_stream(const float *from) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void write_stream(float *to, float4 v) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
__device__ __forceinline__ void add_scaled(float4 &sum, float factor, float4 v) {
  sum.x += factor * v.x, sum.y += factor * v.y, sum.z += factor * v.z, sum.w += factor * v.w;
}
__device__ __forceinline__ void add_other_lanes(float4 &v, int distance) {
  v.x += __shfl_xor_sync(~0u, v.x, distance), v.y += __shfl_xor_sync(~0u, v.y, distance);
  v.z += __shfl_xor_sync(~0u, v.z, distance), v.w += __shfl_xor_sync(~0u, v.w, distance);
}
// Add the warps' sums for four columns, in order.
template <int WARPS, int COLS>
__device__ __forceinline__ float4 all_warps(const float (&sums)[WARPS][COLS], int first) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) add_scaled(total, 1.0f, *(const float4 *)(sums[w] + first));
  return total;
}

// Compute the factors for unit vectors q and k, and their product, with one warp.
template <int D, int COLS> __device__ __forceinline__ void measure(Shared<D, COLS> &s, int lane) {
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
  for (int i = 0; i < D; i += 32) {
    const float q = s.q[i + lane], k = s.k[i + lane];
    qq += q * q, kk += k * k, qk += q * k;
  }
#pragma unroll
  for (int distance = 16; distance; distance >>= 1) {
    qq += __shfl_xor_sync(~0u, qq, distance);
    kk += __shfl_xor_sync(~0u, kk, distance);
    qk += __shfl_xor_sync(~0u, qk, distance);
  }
  if (lane == 0) {
    constexpr float ROOT = D == 128 ? 0.08838834764831845f : 0.125f;  // sqrt(1 / D)
    const float q_factor = rsqrtf(qq + UNIT_EPS) * ROOT, k_factor = rsqrtf(kk + UNIT_EPS);
    s.q_factor = q_factor;
    s.k_factor = k_factor;
    s.dot = qk * q_factor * k_factor;
  }
}

// Convolution of a channel from its window and the token's x, and the window's move.
struct Channel {
  float taps[MOST_KEPT], own_tap, old[MOST_KEPT], x;

  __device__ __forceinline__ void read_taps(const float *weight, int width) {
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i) {
      taps[i] = 0.0f;
      if (i < width - 1) taps[i] = read_constant(weight + i);
    }
    own_tap = read_constant(weight + width - 1);
  }
  __device__ __forceinline__ void read_window(const float *window, int width, bool wanted) {
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i) {
      old[i] = 0.0f;
      if (wanted && i < width - 1) old[i] = read_float(window + i);
    }
  }
  __device__ __forceinline__ void move_on(float *window, int width) const {
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i)
      if (i < width - 1)
        window[i] = i == width - 2 || i + 1 == MOST_KEPT ? x : old[(i + 1) % MOST_KEPT];
  }
  __device__ __forceinline__ float convolved() const {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_KEPT; ++i) total += old[i] * taps[i];
    total += x * own_tap;
    return total * sigmoid(total);
  }
};

template <int D, int COLS> __device__ __forceinline__ void delta_step(const DeltaStep &p) {
  constexpr int WARPS = Shared<D, COLS>::WARPS, CUTS = D / COLS, LANES = COLS / 4, ROWS = D / 16;
  __shared__ __align__(16) Shared<D, COLS> s;
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const int h = blockIdx.x / CUTS, cut = blockIdx.x % CUTS, first = h * D + cut * COLS;
  const int key_head = blockIdx.x / p.num_blocks, rank = blockIdx.x - key_head * p.num_blocks;
  const int keys = p.num_key_heads * D;
  const i64 row = blockIdx.y;
  release_dependents();
  if (!p.early) wait_for_inputs();
  const int position = (int)read_long(p.positions + row);
  const i64 slot = read_long(p.slots + row), target = read_long(p.targets + row);
  if (t == 0) {
    open_barrier(&s.received);
    open_barrier(&s.squared);
    expect_bytes(&s.received, 2 * D * 4);
    expect_bytes(&s.squared, CUTS * 4);
  }
  __syncwarp();
  cluster_arrive();
  // The first COLS threads have values. The next threads have the block's share of q and k.
  const int of_qk = rank * p.share + t - COLS;
  const bool has_value = t < COLS, has_qk = !has_value && t - COLS < p.share && of_qk < 2 * D;
  const bool convolves = has_value || has_qk;
  const int channel = has_value ? 2 * keys + first + t
                                : key_head * D + (of_qk < D ? of_qk : keys + of_qk - D);
  Channel own;
  float norm = 0.0f, a_log = 0.0f, dt_bias = 0.0f;
  if (convolves) own.read_taps(p.weight + channel * p.width, p.width);
  if (has_value) norm = read_constant(p.norm + cut * COLS + t);
  if (warp == WARPS - 1) {
    a_log = read_constant(p.a_log + h);
    dt_bias = read_constant(p.dt_bias + h);
  }
  u16 *out = p.out + row * p.out_stride + first + lane * 4;
  __syncwarp();
  if (position < 0) {  // padding, in all blocks of the cluster
    cluster_wait();
    if (p.early) wait_for_inputs();
    if (t < LANES && position != SKIPPED) *(uint2 *)out = make_uint2(0, 0);
    return;
  }
  // Earlier kernels wrote everything read before the wait: the state of the slot.
  const int column = t % LANES * 4, first_row = t / LANES * ROWS;
  float *held = p.state + ((slot * p.num_heads + h) * D + first_row) * D + cut * COLS + column;
  const i64 num_channels = 2 * keys + p.num_heads * D;
  float *window = p.window + (slot * num_channels + channel) * (p.width - 1);
  float4 state[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    state[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (position > 0) state[i] = p.streams ? read_stream(held + i * D) : read_floats(held + i * D);
  }
  if (convolves) own.read_window(window, p.width, position > 0);
  held += (target - slot) * p.num_heads * D * D;  // where they are kept
  window += (target - slot) * num_channels * (p.width - 1);
  if (p.early) wait_for_inputs();
  float z = 0.0f, a = 0.0f, b = 0.0f;
  if (convolves) own.x = read_float(p.x + row * p.x_stride + channel);
  if (has_value) z = read_float(p.z + row * p.z_stride + first + t);
  if (warp == WARPS - 1) {
    a = read_float(p.a + row * p.a_stride + h);
    b = read_float(p.b + row * p.b_stride + h);
  }
  __syncwarp();
  cluster_wait();  // peers can receive
  if (convolves) {
    const float value = own.convolved();
    own.move_on(window, p.width);
    if (has_value) {
      s.v[t] = value;
      s.gate[t] = norm * (z * sigmoid(z));
    } else {
      s.own[t] = value;
    }
  }
  __syncwarp();
  if (!has_value) {  // whole warps; a lane sends four of its warp's channels to every fourth block
    const int from = warp * 32 + (lane & 7) * 4, share_from = from - COLS;
    const int to = rank * p.share + share_from;
    if (share_from < p.share && to < 2 * D) {
      const float4 values = *(const float4 *)(s.own + from);
      float4 *there = (float4 *)(to < D ? s.q + to : s.k + to - D);
      for (int other = lane >> 3; other < p.num_blocks; other += 4)
        send_to(other, there, values, &s.received);
    }
  }
  if (warp == WARPS - 1 && lane == 0) {
    s.decay = expf(-expf(a_log) * softplus(a + dt_bias));
    s.beta = sigmoid(b);
  }
  wait_bytes(&s.received);
  float4 by_q = make_float4(0.0f, 0.0f, 0.0f, 0.0f), by_k = by_q;
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    const float4 q = *(const float4 *)(s.q + first_row + i);
    const float4 k = *(const float4 *)(s.k + first_row + i);
    add_scaled(by_q, q.x, state[i]), add_scaled(by_k, k.x, state[i]);
    add_scaled(by_q, q.y, state[i + 1]), add_scaled(by_k, k.y, state[i + 1]);
    add_scaled(by_q, q.z, state[i + 2]), add_scaled(by_k, k.z, state[i + 2]);
    add_scaled(by_q, q.w, state[i + 3]), add_scaled(by_k, k.w, state[i + 3]);
  }
  if (warp == WARPS - 1) measure<D, COLS>(s, lane);
  // The lower half of a warp adds the sums of k and the upper half adds the sums of q.
  const bool is_upper = lane & 16;
  float4 kept = is_upper ? by_q : by_k;
  const float4 given = is_upper ? by_k : by_q;
  kept.x += __shfl_xor_sync(~0u, given.x, 16), kept.y += __shfl_xor_sync(~0u, given.y, 16);
  kept.z += __shfl_xor_sync(~0u, given.z, 16), kept.w += __shfl_xor_sync(~0u, given.w, 16);
  if (LANES == 8) add_other_lanes(kept, 8);
  if ((lane & 15) < LANES) *(float4 *)(s.sums[is_upper][warp] + column) = kept;
  __syncthreads();
  const float decay = s.decay, beta = s.beta, by_decay = decay * s.k_factor;
  const float4 predicted = all_warps(s.sums[0], column), v = *(const float4 *)(s.v + column);
  const float4 wrong = make_float4(
      (v.x - by_decay * predicted.x) * beta, (v.y - by_decay * predicted.y) * beta,
      (v.z - by_decay * predicted.z) * beta, (v.w - by_decay * predicted.w) * beta);
  float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (warp == 0) {
    add_scaled(result, decay * s.q_factor, all_warps(s.sums[1], column));
    add_scaled(result, s.dot, wrong);
    float square = result.x * result.x + result.y * result.y;
    square += result.z * result.z + result.w * result.w;
#pragma unroll
    for (int distance = LANES / 2; distance; distance >>= 1)
      square += __shfl_xor_sync(~0u, square, distance);
    if (lane < CUTS) send_to(rank - cut + lane, s.squares + cut, square, &s.squared);
  }
  const float k_factor = s.k_factor;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float k = s.k[first_row + i] * k_factor;
    float4 next = make_float4(state[i].x * decay, state[i].y * decay, state[i].z * decay,
                              state[i].w * decay);
    add_scaled(next, k, wrong);
    if (p.streams) write_stream(held + i * D, next);
    else *(float4 *)(held + i * D) = next;
  }
  if (warp > 0) return;
  wait_bytes(&s.squared);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < CUTS; ++i) squares += s.squares[i];
  const float factor = rsqrtf(squares * (1.0f / D) + p.eps);
  const float4 gate = *(const float4 *)(s.gate + column);
  if (lane < LANES)
    *(uint2 *)out = make_uint2(pack2(result.x * factor * gate.x, result.y * factor * gate.y),
                               pack2(result.z * factor * gate.z, result.w * factor * gate.w));
}

#define DELTA_STEP(D, COLS)                                                                       \
  extern "C" __global__ void __launch_bounds__(4 * COLS, COLS == 32 ? 8 : 4)                      \
  delta_step_##D##_##COLS(const DeltaStep p) { delta_step<D, COLS>(p); }

DELTA_STEP(64, 32)
DELTA_STEP(64, 64)
DELTA_STEP(128, 32)
DELTA_STEP(128, 64)
