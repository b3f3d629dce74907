// Linear attention for one token in one launch: convolution with SiLU and its window, unit vectors,
// gates, the gated delta rule state, and the gated norm of heads.
//
// A block has COLS state columns for a row and a value head. A row's value heads with the same
// key head form a cluster. A block convolves its own values and its share of the q and k channels,
// and sends them to the cluster. A window therefore has a single reader, which moves it. The blocks
// of a head exchange the sums of squares for the norm. All sums have a fixed order, and a row has
// the same bits in every batch.
//
// With k and q of length 1 and the decayed state S: S' = S + k w and w = (v - k S) beta. The result
// is q S' = q S + (q k) w. Therefore a single pass over the state computes both products.

#include "delta_step.cuh"

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
  const i64 *positions, *slots;     // [B]
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
  float squares[MOST_BLOCKS];  // by the head's block
  float decay, beta;
  Factors factors;
  unsigned long long received, squared;  // mbarriers for q and k, and for squares
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
  const i64 slot = read_long(p.slots + row);
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
    if (t < LANES) *(uint2 *)out = make_uint2(0, 0);
    return;
  }
  // Earlier kernels wrote everything read before the wait: the slot's state.
  const int column = t % LANES * 4, first_row = t / LANES * ROWS;
  float *saved = p.state + ((slot * p.num_heads + h) * D + first_row) * D + cut * COLS + column;
  const i64 num_channels = 2 * keys + p.num_heads * D;
  float *window = p.window + (slot * num_channels + channel) * (p.width - 1);
  float4 state[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    state[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (position > 0) state[i] = p.streams ? read_stream(saved + i * D) : read_floats(saved + i * D);
  }
  if (convolves) own.read_window(window, p.width, position > 0);
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
  multiply<ROWS>(by_q, by_k, s.q + first_row, s.k + first_row, state);
  if (warp == WARPS - 1) measure<D>(s.factors, s.q, s.k, lane);
  const bool is_upper = lane & 16;
  const float4 sums = add_lanes<LANES>(by_q, by_k, is_upper);
  if ((lane & 15) < LANES) *(float4 *)(s.sums[is_upper][warp] + column) = sums;
  __syncthreads();
  const float decay = s.decay, by_decay = decay * s.factors.k;
  const float4 wrong = errors(*(const float4 *)(s.v + column), by_decay,
                              all_warps(s.sums[0], column), s.beta);
  float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (warp == 0) {
    add_scaled(result, decay * s.factors.q, all_warps(s.sums[1], column));
    add_scaled(result, s.factors.dot, wrong);
    float square = square_of(result);
#pragma unroll
    for (int distance = LANES / 2; distance; distance >>= 1)
      square += __shfl_xor_sync(~0u, square, distance);
    if (lane < CUTS) send_to(rank - cut + lane, s.squares + cut, square, &s.squared);
  }
  const float k_factor = s.factors.k;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float4 next = next_state(state[i], decay, s.k[first_row + i] * k_factor, wrong);
    if (p.streams) write_stream(saved + i * D, next);
    else *(float4 *)(saved + i * D) = next;
  }
  if (warp > 0) return;
  wait_bytes(&s.squared);
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < CUTS; ++i) squares += s.squares[i];
  const float factor = rsqrtf(squares * (1.0f / D) + p.eps);
  const float4 y = gated(result, factor, *(const float4 *)(s.gate + column));
  if (lane < LANES) *(uint2 *)out = make_uint2(pack2(y.x, y.y), pack2(y.z, y.w));
}

#define DELTA_STEP(D, COLS)                                                                       \
  extern "C" __global__ void __launch_bounds__(4 * COLS, COLS == 32 ? 8 : 4)                      \
  delta_step_##D##_##COLS(const DeltaStep p) { delta_step<D, COLS>(p); }

DELTA_STEP(64, 32)
DELTA_STEP(64, 64)
DELTA_STEP(128, 32)
DELTA_STEP(128, 64)
