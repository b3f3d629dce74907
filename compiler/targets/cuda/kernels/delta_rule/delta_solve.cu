// Gated delta rule in prefill, first part: solve each chunk's linear system with 64 tokens.
//
// A block has a chunk and a value head. Let k be unit keys, d cumulative decays and beta the steps.
// The corrections solve (1 + below) x = beta (v - e^d k S), with below_ij = beta_i k_i k_j e^(d_i -
// d_j) for i > j and the state S before the chunk. The block stores the part from v and the factor
// of S. Diagonal blocks of 16 are inverted column by column and then joined in pairs. Products of
// powers would cancel for similar keys. Products are TF32 and sums are float32 in a fixed order.
// Absent tokens count as zeros.

#include "attention_primitives.cuh"
#include "delta_gates.cuh"

constexpr int C = 64;  // tokens in a chunk
constexpr int D = 128;  // channels in a key and in a value
constexpr int WARPS = 8;  // a warp reads 8 tokens and computes 16 channels of both results
constexpr int GATES_WARP = 7;  // the warp with the least work in the system
// Row strides in shared memory, in floats, without bank conflicts. CHANNELS: eight rows with four
// lanes, and alternate rows with eight lanes. SYSTEM: four rows with four pairs.
constexpr int CHANNELS = D + 4, SYSTEM = C + 8;

struct DeltaSolve {
  float *from_state;            // [N, H, C, D], TF32
  float *corrections;           // [N, H, D, C]
  float *keys;                  // [N, G, D, C], TF32
  float *totals;                // [N, H, C]
  float *scales;  // [N, G, 2, C]: for queries, for keys
  const float *qkv;  // [T, 2 G D + H D], row stride `qkv_stride`
  const float *a, *b;           // [T, H]
  const float *a_log, *dt_bias; // [H]
  const i64 *positions;         // [T]
  int num_tokens, num_heads, num_key_heads, qkv_stride, a_stride, b_stride;
};

struct Shared {
  float k[C][CHANNELS];  // unit length, in TF32
  float v[C][CHANNELS];
  float x[C][SYSTEM];  // the system, its inverse, and the inverse times beta in TF32
  float y[C][SYSTEM];  // the inverse times beta and the decayed state factor
  float total[C], beta[C], left[C];
};

// Read eight tokens of a head. A lane has four channels of each.
__device__ __forceinline__ void read_rows(u32 (&rows)[8][4], const float *from, i64 stride,
                                          u32 there) {
#pragma unroll
  for (int r = 0; r < 8; ++r)
    read<4>(rows[r], (const u8 *)(from + r * stride), there >> r & 1);
}

// Return the reciprocal length of a token's channels in a warp.
__device__ __forceinline__ float unit_factor(const u32 (&row)[4]) {
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) square += __uint_as_float(row[i]) * __uint_as_float(row[i]);
#pragma unroll
  for (int distance = 16; distance; distance >>= 1)
    square += __shfl_xor_sync(~0u, square, distance);
  return rsqrtf(square + UNIT_EPS);
}

__device__ __forceinline__ float sum_up_to(float v, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance <<= 1) {
    const float before = __shfl_up_sync(~0u, v, distance);
    if (lane >= distance) v += before;
  }
  return v;
}

// Compute cumulative log decays and steps of the tokens, with one warp.
__device__ __forceinline__ void make_gates(Shared &s, const DeltaSolve &p, int first, int h,
                                           float a_log, float dt_bias, int lane) {
  float decay[2], beta[2];
  u32 a[2], b[2];
  bool there[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = first + 32 * i + lane;
    there[i] = token < p.num_tokens && read_long(p.positions + token) >= 0;
    read<1>(&a[i], (const u8 *)(p.a + (i64)token * p.a_stride + h), there[i]);
    read<1>(&b[i], (const u8 *)(p.b + (i64)token * p.b_stride + h), there[i]);
  }
  const float rate = -expf(a_log);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    decay[i] = there[i] ? rate * softplus(__uint_as_float(a[i]) + dt_bias) : 0.0f;
    beta[i] = there[i] ? 1.0f / (1.0f + expf(-__uint_as_float(b[i]))) : 0.0f;
  }
  float total[2];
  total[0] = sum_up_to(decay[0], lane);
  total[1] = __shfl_sync(~0u, total[0], 31) + sum_up_to(decay[1], lane);
  float *totals = p.totals + ((i64)blockIdx.x * p.num_heads + h) * C;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = 32 * i + lane;
    s.total[place] = totals[place] = total[i];
    s.beta[place] = beta[i];
    s.left[place] = -expf(total[i]);
  }
}

// Read values and unit keys of the chunk's tokens, compute the gates, and store a key's scales
// head.
__device__ __forceinline__ void read_chunk(Shared &s, const DeltaSolve &p, int h, float a_log,
                                           float dt_bias, int warp, int lane) {
  const int ratio = p.num_heads / p.num_key_heads, key_head = h / ratio, place = warp * 8;
  const int first = blockIdx.x * C, token = first + place;
  const bool has_key_head = h % ratio == 0, is_inside = token + (lane & 7) < p.num_tokens;
  const u32 there =
      __ballot_sync(~0u, is_inside && read_long(p.positions + token + (lane & 7)) >= 0);
  const i64 stride = p.qkv_stride, keys = (i64)p.num_key_heads * D;
  const float *q_from = p.qkv + token * stride + key_head * D + lane * 4;
  const float *v_from = p.qkv + token * stride + 2 * keys + h * D + lane * 4;
  u32 k[8][4], q[8][4];
  read_rows(k, q_from + keys, stride, there);
  if (has_key_head) read_rows(q, q_from, stride, there);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float *to = &s.v[place + r][lane * 4];
    if (there >> r & 1)
      copy16(shared_address(to), v_from + r * stride);
    else
      *(float4 *)to = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  commit();
  if (warp == GATES_WARP) make_gates(s, p, first, h, a_log, dt_bias, lane);
  float k_scale = 0.0f, q_scale = 0.0f;  // lane r: for row r
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float scale = unit_factor(k[r]);
    if (lane == r) k_scale = scale;
    *(float4 *)&s.k[place + r][lane * 4] =
        make_float4(to_tf32(__uint_as_float(k[r][0]) * scale),
                    to_tf32(__uint_as_float(k[r][1]) * scale),
                    to_tf32(__uint_as_float(k[r][2]) * scale),
                    to_tf32(__uint_as_float(k[r][3]) * scale));
  }
  if (!has_key_head) return;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const float scale = unit_factor(q[r]) * 0.08838834764831845f;  // sqrt(1 / D)
    if (lane == r) q_scale = scale;
  }
  float *scales = p.scales + ((i64)blockIdx.x * p.num_key_heads + key_head) * (2 * C) + place;
  if (lane < 8) {
    scales[lane] = q_scale;
    scales[C + lane] = k_scale;
  }
}

// Compute up to three 16 x 8 tiles below the diagonal, by warp.
__device__ __forceinline__ void make_system(Shared &s, int warp, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  const int row = (0x01122333 >> 4 * warp & 15) * 16, column = (0x03030630 >> 4 * warp & 15) * 8;
  const int count = min(3, (row + 16 - column) / 8);
  float tiles[3][4] = {};
#pragma unroll 4
  for (int i = quad; i < D; i += 8) {
    const float *upper = &s.k[row + group][i], *lower = &s.k[row + group + 8][i];
    const u32 a[4] = {__float_as_uint(upper[0]), __float_as_uint(lower[0]),
                      __float_as_uint(upper[4]), __float_as_uint(lower[4])};
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const float *other = &s.k[min(column + 8 * n, row + 8) + group][i];  // some tiles twice
      mma_tf32(tiles[n], a, __float_as_uint(other[0]), __float_as_uint(other[4]));
    }
  }
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    if (n >= count) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + group + 8 * half, j = column + 8 * n + 2 * quad;
      const float beta = s.beta[i], total = s.total[i];
      float2 below = make_float2(0.0f, 0.0f);
      if (i > j) below.x = beta * tiles[n][2 * half] * expf(total - s.total[j]);
      if (i > j + 1) below.y = beta * tiles[n][2 * half + 1] * expf(total - s.total[j + 1]);
      *(float2 *)&s.x[i][j] = below;
    }
  }
}

// Invert a diagonal block of 16 with one warp. A lane has a column of the inverse.
__device__ __forceinline__ void invert_block(Shared &s, int first, int lane) {
  const int column = lane & 15;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < 16; j += 4) {
    float below[16][4];
#pragma unroll
    for (int i = j + 1; i < 16; ++i) {
      const float4 four = *(const float4 *)&s.x[first + i][first + j];
      below[i][0] = four.x, below[i][1] = four.y, below[i][2] = four.z, below[i][3] = four.w;
    }
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = j + step + 1; i < 16; ++i) x[i] -= below[i][step] * x[j + step];
  }
  __syncwarp();
  if (lane < 16)
#pragma unroll
    for (int i = 0; i < 16; ++i) s.x[first + i][first + column] = x[i];
}

// Multiply a 16 x 8 tile: rows from `a` times columns from `b`, both in the system's matrix.
__device__ __forceinline__ void multiply(float (&tile)[4], const float *a, const float *b,
                                         int from, int to, int lane) {
  const int group = lane >> 2, pair = 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) tile[i] = 0.0f;
  for (int step = from; step < to; step += 8) {
    const float2 upper = *(const float2 *)(a + group * SYSTEM + step + pair);
    const float2 lower = *(const float2 *)(a + (group + 8) * SYSTEM + step + pair);
    const float *column = b + (step + pair) * SYSTEM + group;
    const u32 rows[4] = {__float_as_uint(to_tf32(upper.x)), __float_as_uint(to_tf32(lower.x)),
                         __float_as_uint(to_tf32(upper.y)), __float_as_uint(to_tf32(lower.y))};
    mma_tf32(tile, rows, __float_as_uint(to_tf32(column[0])),
             __float_as_uint(to_tf32(column[SYSTEM])));
  }
}
__device__ __forceinline__ void keep(float *to, const float (&tile)[4], float factor, int lane) {
  to += (lane >> 2) * SYSTEM + 2 * (lane & 3);
  *(float2 *)to = make_float2(tile[0] * factor, tile[1] * factor);
  *(float2 *)(to + 8 * SYSTEM) = make_float2(tile[2] * factor, tile[3] * factor);
}

// Join pairs of inverses of SIZE with the part below them, using all warps. The area above the
// diagonal blocks stores the first product and is not read as part of the blocks.
template <int SIZE> __device__ __forceinline__ void join(Shared &s, int warp, int lane) {
  constexpr int COLUMNS = SIZE / 8, TILES = SIZE / 16 * COLUMNS;
  const bool has_tile = warp < 32 / SIZE * TILES;
  const int first = warp / TILES * (2 * SIZE), second = first + SIZE;
  const int row = warp % TILES / COLUMNS * 16, column = warp % COLUMNS * 8;
  float tile[4];
  if (has_tile) {
    multiply(tile, &s.x[second + row][second], &s.x[second][first + column], 0, row + 16, lane);
    keep(&s.x[first + row][second + column], tile, 1.0f, lane);
  }
  __syncthreads();
  if (has_tile) {
    multiply(tile, &s.x[first + row][second], &s.x[first][first + column], column / 16 * 16, SIZE,
             lane);
    keep(&s.x[second + row][first + column], tile, -1.0f, lane);
  }
  __syncthreads();
}

// Compute the factors of values and keys in TF32, using all threads.
__device__ __forceinline__ void scale_inverse(Shared &s, int t) {
#pragma unroll
  for (int i = 0; i < C * C / 4; i += WARPS * 32) {
    const int row = (i + t) / (C / 4), column = (i + t) % (C / 4) * 4;
    if (column >= row / 16 * 16 + 16) continue;  // above the diagonal
    float4 x = *(const float4 *)&s.x[row][column];
    const float4 beta = *(const float4 *)&s.beta[column];
    const float4 left = *(const float4 *)&s.left[column];
    x.x *= beta.x, x.y *= beta.y, x.z *= beta.z, x.w *= beta.w;
    *(float4 *)&s.x[row][column] =
        make_float4(to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w));
    *(float4 *)&s.y[row][column] =
        make_float4(to_tf32(x.x * left.x), to_tf32(x.y * left.y), to_tf32(x.z * left.z),
                    to_tf32(x.w * left.w));
  }
}

// Write sixteen value channels, as rows, for all tokens.
__device__ __forceinline__ void write_corrections(const Shared &s, float *to, int channel,
                                                  int lane) {
  const int group = lane >> 2, pair = 2 * (lane & 3);
  float tiles[C / 8][4] = {};
#pragma unroll
  for (int step = 0; step < C; step += 8) {
    const float *even = &s.v[step + pair][channel + group], *odd = even + CHANNELS;
    const u32 a[4] = {__float_as_uint(to_tf32(even[0])), __float_as_uint(to_tf32(even[8])),
                      __float_as_uint(to_tf32(odd[0])), __float_as_uint(to_tf32(odd[8]))};
#pragma unroll
    for (int n = step / 8; n < C / 8; ++n) {
      const float2 b = *(const float2 *)&s.x[8 * n + group][step + pair];
      mma_tf32(tiles[n], a, __float_as_uint(b.x), __float_as_uint(b.y));
    }
  }
  to += (channel + group) * C + pair;
#pragma unroll
  for (int n = 0; n < C / 8; ++n) {
    *(float2 *)(to + 8 * n) = make_float2(tiles[n][0], tiles[n][1]);
    *(float2 *)(to + 8 * n + 8 * C) = make_float2(tiles[n][2], tiles[n][3]);
  }
}

// Write all tokens, as rows, for sixteen key channels.
__device__ __forceinline__ void write_from_state(const Shared &s, float *to, int channel,
                                                 int lane) {
  const int group = lane >> 2, pair = 2 * (lane & 3);
  float tiles[C / 16][2][4] = {};
#pragma unroll
  for (int step = 0; step < C; step += 8) {
    const float *even = &s.k[step + pair][channel + group], *odd = even + CHANNELS;
    const u32 b[2][2] = {{__float_as_uint(even[0]), __float_as_uint(odd[0])},
                         {__float_as_uint(even[8]), __float_as_uint(odd[8])}};
#pragma unroll
    for (int m = step / 16; m < C / 16; ++m) {
      const float2 upper = *(const float2 *)&s.y[16 * m + group][step + pair];
      const float2 lower = *(const float2 *)&s.y[16 * m + group + 8][step + pair];
      const u32 a[4] = {__float_as_uint(upper.x), __float_as_uint(lower.x),
                        __float_as_uint(upper.y), __float_as_uint(lower.y)};
      mma_tf32(tiles[m][0], a, b[0][0], b[0][1]);
      mma_tf32(tiles[m][1], a, b[1][0], b[1][1]);
    }
  }
  to += group * D + channel + pair;
#pragma unroll
  for (int m = 0; m < C / 16; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float(&tile)[4] = tiles[m][n];
      float *at = to + 16 * m * D + 8 * n;
      *(float2 *)at = make_float2(to_tf32(tile[0]), to_tf32(tile[1]));
      *(float2 *)(at + 8 * D) = make_float2(to_tf32(tile[2]), to_tf32(tile[3]));
    }
}

// Write thirty-two key channels for all tokens.
__device__ __forceinline__ void write_keys(const Shared &s, float *to, int channel, int lane) {
  channel += lane & 15;
#pragma unroll
  for (int half = 0; half < 2; ++half, channel += 16)
#pragma unroll
    for (int i = 0; i < C; i += 8) {
      const int place = i + (lane >> 4) * 4;
      const float *from = &s.k[place][channel];
      *(float4 *)(to + channel * C + place) = make_float4(
          from[0], from[CHANNELS], from[2 * CHANNELS], from[3 * CHANNELS]);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) delta_solve(const DeltaSolve p) {
  extern __shared__ __align__(16) u8 memory[];
  Shared &s = *(Shared *)memory;
  release_dependents();
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, h = blockIdx.y;
  const float a_log = read_float(p.a_log + h), dt_bias = read_float(p.dt_bias + h);
  wait_for_inputs();
  read_chunk(s, p, h, a_log, dt_bias, warp, lane);
  __syncthreads();
  make_system(s, warp, lane);
  __syncthreads();
  const int ratio = p.num_heads / p.num_key_heads, key_head = h / ratio;
  if (warp < 4) {
    invert_block(s, warp * 16, lane);
  } else if (h % ratio == 0) {
    float *keys = p.keys + ((i64)blockIdx.x * p.num_key_heads + key_head) * (D * C);
    write_keys(s, keys, (warp - 4) * 32, lane);
  }
  __syncthreads();
  join<16>(s, warp, lane);
  join<32>(s, warp, lane);
  scale_inverse(s, t);
  wait_copies<0>();
  __syncthreads();
  const i64 at = ((i64)blockIdx.x * p.num_heads + h) * (C * D);
  write_corrections(s, p.corrections + at, warp * 16, lane);
  write_from_state(s, p.from_state + at, warp * 16, lane);
}
