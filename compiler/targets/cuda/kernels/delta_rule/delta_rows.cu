// Linear attention for consecutive tokens of a slot in one launch, as delta_step.cu computes one.
//
// The tokens are the accepted drafts of the slot's previous launch, then its rows. Row 0 has the next
// token, and later rows have drafts. The kernel keeps the state in registers. It writes the window
// and the state after row 0, and the drafts' inputs. The next launch repeats the accepted
// drafts from these inputs. Without rows, it writes the state after the accepted drafts.
//
// The blocks of a cluster exchange q and k of all tokens at once.

#include "delta_step.cuh"

constexpr int MOST_ROWS = 8;
constexpr int MOST_TOKENS = 2 * MOST_ROWS - 1;

struct DeltaRows {
  const float *x;                // [B, 2 G D + H D], row stride `x_stride`
  const float *weight;           // [2 G D + H D, width]
  float *window;                 // [S, 2 G D + H D, width - 1]
  const float *a, *b;            // [B, H]
  const float *a_log, *dt_bias;  // [H]
  const float *z;                // [B, H D]
  const float *norm;             // [D]
  float *state;                  // [S, H, D, D]
  u16 *out;                      // bf16 [B, H D]
  float *draft_x;                // [S, num_drafts, 2 G D + H D]
  float *draft_gates;            // [S, num_drafts, 2, H]
  const i64 *positions, *slots;  // [B]
  const i64 *counts, *accepted;  // [B]: at a slot's first row, its rows and accepted drafts; else 0
  int x_stride, a_stride, b_stride, z_stride, out_stride;
  int num_heads, num_key_heads, width, early;
  int num_blocks, share, num_drafts;
  float eps;
};

template <int D, int COLS> struct Shared {
  static constexpr int WARPS = COLS / 8;
  float q[MOST_TOKENS][D], k[MOST_TOKENS][D];  // received from the cluster
  float own[4 * COLS];                         // q and k channels by thread
  float v[MOST_TOKENS][COLS], gate[MOST_ROWS][COLS], result[MOST_ROWS][COLS];
  float sums[2][2][WARPS][COLS];  // by the token's parity; k S and q S before decay
  float squares[MOST_ROWS][MOST_BLOCKS];
  float decay[MOST_TOKENS], beta[MOST_TOKENS];
  Factors factors[MOST_TOKENS];
  unsigned long long received, squared;  // mbarriers for q and k, and for squares
};

template <int D, int COLS> __device__ __forceinline__ void delta_rows(const DeltaRows &p) {
  constexpr int WARPS = Shared<D, COLS>::WARPS, CUTS = D / COLS, LANES = COLS / 4, ROWS = D / 16;
  __shared__ __align__(16) Shared<D, COLS> s;
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const int h = blockIdx.x / CUTS, cut = blockIdx.x % CUTS, first = h * D + cut * COLS;
  const int key_head = blockIdx.x / p.num_blocks, rank = blockIdx.x - key_head * p.num_blocks;
  const int keys = p.num_key_heads * D;
  const i64 row = blockIdx.y, num_channels = 2 * keys + p.num_heads * D;
  release_dependents();
  if (!p.early) wait_for_inputs();
  const int position = (int)read_long(p.positions + row);
  const int count = (int)read_long(p.counts + row);
  const int accepted = (int)read_long(p.accepted + row), num_tokens = accepted + count;
  const i64 slot = read_long(p.slots + row);
  if (num_tokens == 0 || position < 0) {  // a later row of a slot, or padding
    if (p.early) wait_for_inputs();
    u16 *out = p.out + row * p.out_stride + first + lane * 4;
    if (num_tokens && t < LANES) *(uint2 *)out = make_uint2(0, 0);
    return;
  }
  if (t == 0) {
    open_barrier(&s.received);
    open_barrier(&s.squared);
    expect_bytes(&s.received, 2 * D * 4 * num_tokens);
    expect_bytes(&s.squared, CUTS * 4 * count);
  }
  __syncwarp();
  cluster_arrive();
  const int of_qk = rank * p.share + t - COLS;
  const bool has_value = t < COLS, has_qk = !has_value && t - COLS < p.share && of_qk < 2 * D;
  const bool convolves = has_value || has_qk;
  const int channel = has_value ? 2 * keys + first + t
                                : key_head * D + (of_qk < D ? of_qk : keys + of_qk - D);
  Channel own;
  float norm = 0.0f;
  if (convolves) own.read_taps(p.weight + channel * p.width, p.width);
  if (has_value) norm = read_constant(p.norm + cut * COLS + t);
  const int column = t % LANES * 4, first_row = t / LANES * ROWS;
  float *saved = p.state + ((slot * p.num_heads + h) * D + first_row) * D + cut * COLS + column;
  float *window = p.window + (slot * num_channels + channel) * (p.width - 1);
  float *draft_x = p.draft_x + slot * p.num_drafts * num_channels + channel;
  float *draft_gates = p.draft_gates + slot * p.num_drafts * 2 * p.num_heads + h;
  const bool has_state = position > accepted;
  float4 state[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    state[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (has_state) state[i] = read_floats(saved + i * D);
  }
  if (convolves) own.read_window(window, p.width, has_state);
  float x[MOST_TOKENS], z[MOST_ROWS];
#pragma unroll
  for (int i = 0; i < MOST_TOKENS; ++i)
    if (convolves && i < accepted) x[i] = read_float(draft_x + i * num_channels);
  float a = 0.0f, b = 0.0f;  // of token `lane`
  const bool has_gates = warp == WARPS - 1 && lane < num_tokens;
  if (has_gates && lane < accepted) {
    a = read_float(draft_gates + 2 * lane * p.num_heads);
    b = read_float(draft_gates + (2 * lane + 1) * p.num_heads);
  }
  if (p.early) wait_for_inputs();
#pragma unroll
  for (int i = 0; i < MOST_TOKENS; ++i)
    if (convolves && i >= accepted && i < num_tokens)
      x[i] = read_float(p.x + (row + i - accepted) * p.x_stride + channel);
#pragma unroll
  for (int i = 0; i < MOST_ROWS; ++i)
    if (has_value && i < count) z[i] = read_float(p.z + (row + i) * p.z_stride + first + t);
  if (has_gates && lane >= accepted) {
    a = read_float(p.a + (row + lane - accepted) * p.a_stride + h);
    b = read_float(p.b + (row + lane - accepted) * p.b_stride + h);
  }
  __syncwarp();
  cluster_wait();  // peers can receive
  const int last = count ? accepted : accepted - 1;  // the token with the stored window and state
#pragma unroll
  for (int i = 0; i < MOST_TOKENS; ++i) {
    if (i >= num_tokens) break;
    if (convolves) {
      own.x = x[i];
      const float value = own.convolved();
      if (i == last) own.move_on(window, p.width);
      own.shift(p.width);
      if (i > last) draft_x[(i - last - 1) * num_channels] = x[i];
      if (has_value) s.v[i][t] = value;
      else s.own[t] = value;
    }
    __syncwarp();
    if (!has_value) {  // see delta_step.cu
      const int from = warp * 32 + (lane & 7) * 4, share_from = from - COLS;
      const int to = rank * p.share + share_from;
      if (share_from < p.share && to < 2 * D) {
        const float4 values = *(const float4 *)(s.own + from);
        float4 *there = (float4 *)(to < D ? s.q[i] + to : s.k[i] + to - D);
        for (int other = lane >> 3; other < p.num_blocks; other += 4)
          send_to(other, there, values, &s.received);
      }
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < MOST_ROWS; ++i)
    if (has_value && i < count) s.gate[i][t] = norm * (z[i] * sigmoid(z[i]));
  if (has_gates) {
    s.decay[lane] = expf(-expf(read_constant(p.a_log + h)) *
                         softplus(a + read_constant(p.dt_bias + h)));
    s.beta[lane] = sigmoid(b);
  }
  wait_bytes(&s.received);
  for (int i = warp; i < num_tokens; i += WARPS) measure<D>(s.factors[i], s.q[i], s.k[i], lane);
  const bool is_upper = lane & 16;
  for (int i = 0; i < num_tokens; ++i) {
    float4 by_q = make_float4(0.0f, 0.0f, 0.0f, 0.0f), by_k = by_q;
    multiply<ROWS>(by_q, by_k, s.q[i] + first_row, s.k[i] + first_row, state);
    const float4 sums = add_lanes<LANES>(by_q, by_k, is_upper);
    if ((lane & 15) < LANES) *(float4 *)(s.sums[i & 1][is_upper][warp] + column) = sums;
    __syncthreads();  // two sets of sums: a slow warp may still read those of the previous token
    const Factors factors = s.factors[i];
    const float decay = s.decay[i], by_decay = decay * factors.k;
    const float4 wrong = errors(*(const float4 *)(s.v[i] + column), by_decay,
                                all_warps(s.sums[i & 1][0], column), s.beta[i]);
    const int j = i - accepted;
    if (warp == 0 && j >= 0) {
      float4 result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      add_scaled(result, decay * factors.q, all_warps(s.sums[i & 1][1], column));
      add_scaled(result, factors.dot, wrong);
      float square = square_of(result);
#pragma unroll
      for (int distance = LANES / 2; distance; distance >>= 1)
        square += __shfl_xor_sync(~0u, square, distance);
      if (lane < CUTS) send_to(rank - cut + lane, s.squares[j] + cut, square, &s.squared);
      if (lane < LANES) *(float4 *)(s.result[j] + column) = result;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      state[r] = next_state(state[r], decay, s.k[i][first_row + r] * factors.k, wrong);
      if (i == last) *(float4 *)(saved + r * D) = state[r];
    }
  }
  if (count == 0) return;
  wait_bytes(&s.squared);  // all blocks of the head have read the gates
  if (cut == 0 && has_gates && lane > last) {
    draft_gates[2 * (lane - last - 1) * p.num_heads] = a;
    draft_gates[(2 * (lane - last - 1) + 1) * p.num_heads] = b;
  }
  __syncthreads();
  for (int j = warp; j < count; j += WARPS) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < CUTS; ++i) squares += s.squares[j][i];
    const float factor = rsqrtf(squares * (1.0f / D) + p.eps);
    if (lane >= LANES) continue;
    const float4 y = gated(*(const float4 *)(s.result[j] + column), factor,
                           *(const float4 *)(s.gate[j] + column));
    u16 *out = p.out + (row + j) * p.out_stride + first + column;
    *(uint2 *)out = make_uint2(pack2(y.x, y.y), pack2(y.z, y.w));
  }
}

#define DELTA_ROWS(D, COLS)                                                                       \
  extern "C" __global__ void __launch_bounds__(4 * COLS, COLS == 32 ? 3 : 2)                      \
  delta_rows_##D##_##COLS(const DeltaRows p) { delta_rows<D, COLS>(p); }

DELTA_ROWS(64, 32)
DELTA_ROWS(64, 64)
DELTA_ROWS(128, 32)
DELTA_ROWS(128, 64)
