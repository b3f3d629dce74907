// Tiles of a packed weight (packed_weight.py): fetch, decoding, multiplication and epilogue.
#pragma once

#include "primitives.cuh"

// Formats.
constexpr int BF16 = 0, BFP8 = 1, BFP4 = 2, Q40 = 3, Q80 = 4, FP8 = 5, MXFP4 = 6, NVFP4 = 7;
constexpr int STORE = 0, ADD = 1, SWIGLU = 2;  // epilogues
constexpr int SLICES = 8;
constexpr int STEP = 128;  // columns in a tile

// Small codes with scales for blocks: see coded_tiles.py.
template <int F> constexpr bool is_coded = F == Q40 || F == Q80 || F == FP8 || F == NVFP4;
// The matrix unit sums a block's codes, and float32 applies the scale. In NVFP4, codes times scales
// are exact in bfloat16.
template <int F> constexpr bool is_summed = is_coded<F> && F != NVFP4;
// Lanes read data copied by their peers.
template <int F> constexpr bool is_exchanged = F == BF16 || is_coded<F>;
template <int F>
constexpr int pieces = F == BF16 ? 8 : F == BFP8 || F == Q80 || F == FP8 ? 4 : 2;
template <int F>
constexpr int step_bytes = pieces<F> * 512 + (F == BF16 ? 0 : F == FP8 || F == MXFP4 ? 64 : 128);
template <int F> constexpr int tile_bytes = F == BF16 ? 16 * STEP * 2 : step_bytes<F>;  // in memory
// padding elements in a row of x: eight rows in different shared memory banks
constexpr int X_PADDING = 8;
template <int F> constexpr int x_padding = is_coded<F> ? 32 : X_PADDING;

struct Product {
  const u8 *weight;
  const void *x;  // bf16 [M, x_stride], or fp32 [K] with a norm (M = 1)
  const float *norm;      // [K], or null
  const float *bias;      // [N], or null
  void *out;              // fp32 [M, out_stride] (STORE, ADD), bf16 (SWIGLU: [M, N / 2])
  int num_tokens, num_rows, num_columns, num_tiles, num_steps, num_slices;
  int x_stride, out_stride, epilogue;
  int places;  // SWIGLU: tokens of the next matmul's x, 0 elsewhere
  int alone;  // the next kernel starts after this kernel ends: see release_beside
  float eps;
  union {
    float all;           // scale of the stored values, a power of two
    const double *rows;  // NVFP4: second scales of rows, in whole tiles
  } scale;
};

// The L1 cache has the memory without shared memory, and its size is fixed while blocks are
// resident. Attention and delta rule steps, which read mostly through L1, lose more than they gain
// if they start during this kernel.
__device__ __forceinline__ void release_beside(const Product &p) {
  if (!p.alone) release_dependents();
}

__device__ __forceinline__ u32 low_bits(const void *p) { return (u32)(size_t)p; }

// A lane's addresses of the tiles that its warp fetches: row tiles with some steps each.
template <int F> struct Source {
  static constexpr int ADVANCE = F == BF16 ? STEP * 2 : step_bytes<F>;
  const u8 *a, *b;  // bf16: rows g and g + 8; block formats: values, and exponents or scales
  u32 to, to4;  // the lane's offsets in a shared memory tile

  __device__ __forceinline__ Source(const u8 *weight, int num_steps, int tile, int step, int lane) {
    if (F == BF16) {
      const int g = lane >> 2, t = lane & 3;
      const size_t stride = (size_t)num_steps * (STEP * 2);
      a = weight + ((size_t)tile * 16 + g) * stride + step * (STEP * 2) + t * 16;
      b = a + 8 * stride;
      to = to4 = (g * 4 + (t ^ (g >> 1))) * 16;  // chunk t of eight rows, in eight banks
    } else {
      a = weight + ((size_t)tile * num_steps + step) * step_bytes<F> + lane * 16;
      const int four = F == FP8 ? lane & 15 : F == MXFP4 ? lane >> 1 : lane;
      // Equal for bfp4, but with it the compiler schedules the loop for 8 tokens better (15 %).
      b = F == BFP4 ? a + pieces<F> * 512 - lane * 12 : a + pieces<F> * 512 - lane * 16 + four * 4;
      to = lane * 16;
      to4 = pieces<F> * 512 + four * 4;
    }
  }
  __device__ __forceinline__ void fetch(u32 place16, u32 place4) {
    copy(place16, place4, 0);
    skip(ADVANCE);
  }
  // Copy the tile after `offset` bytes. `READS_ONCE`: no other block reads the tile.
  template <bool READS_ONCE = false>
  __device__ __forceinline__ void copy(u32 place16, u32 place4, int offset) const {
    auto run = [](u32 to, const u8 *from) { READS_ONCE ? copy16_once(to, from) : copy16(to, from); };
    if (F == BF16) {
#pragma unroll
      for (int piece = 0; piece < 8; ++piece)
        run(place16 + piece * 512, (piece & 1 ? b : a) + offset + (piece >> 1) * 64);
    } else {
#pragma unroll
      for (int piece = 0; piece < pieces<F>; ++piece)
        run(place16 + piece * 512, a + offset + piece * 512);
      copy4(place4, b + offset);
    }
  }
  __device__ __forceinline__ void skip(long long bytes) {
    a += bytes;
    b += bytes;
  }
};

// A lane's offsets of a tile's weights and of x in shared memory.
template <int F> __device__ __forceinline__ u32 weight_offset(int lane) {
  const int row = lane & 7, matrix = lane >> 3;
  return F == BF16 ? (matrix & 1) * 512 + (row * 4 + ((matrix >> 1) ^ (row >> 1))) * 16 : lane * 16;
}
template <int F> __device__ __forceinline__ u32 x_offset(int lane, int row_bytes) {
  return F == BF16 ? (lane & 7) * row_bytes + (lane >> 3) * 16
                   : (lane >> 2) * row_bytes + (lane & 3) * (is_coded<F> ? 16 : 32);
}
// A lane's offset for odd halves (bf16), exponents, or scales. `read_columns` gives every lane the
// scales for its rows.
template <int F> __device__ __forceinline__ u32 second_offset(int lane) {
  if (F == BF16) return weight_offset<F>(lane) ^ 32;
  if (F == FP8) return pieces<F> * 512 + (lane >> 2) * 4;
  if (F == MXFP4) return pieces<F> * 512 + (lane >> 1) * 4;
  if (F == NVFP4) return pieces<F> * 512 + ((lane >> 1 & 1) * 16 + (lane >> 2)) * 4;
  return pieces<F> * 512 + (is_coded<F> ? (lane >> 3) * 32 + (lane & 1) * 16 : lane * 4);
}

// 2^e in both halves, for byte `i` of the exponents. Both formats use this scale.
__device__ __forceinline__ u32 scale_of(u32 exponents, int i) {
  return __byte_perm(exponents, 0, 0x4440 | i) * 0x00800080u + 0x3F803F80u;
}
// (1 + m / 8) * 2^(e + 96) in both halves, for e5m3 byte `i`. The product selects a half for free.
__device__ __forceinline__ u32 scale_of_e5m3(u32 bytes, int i) {
  const u32 two = i & 1 ? (bytes & 0xFF00FF00u) / 16 : (bytes & 0x00FF00FFu) * 16;
  return both_halves(two + 0x6F806F80u, i & 2);
}
// Decode four A fragments of 16 columns for each half of a tile; see packed_weight.py. Codes are
// subnormal bfloat16, or above 2^-122, and the scale makes them exact.
__device__ __forceinline__ void decode_bfp8(u32 (&a)[8], const u32 (&w)[4], u32 scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = multiply2(w[i] & 0x807F807Fu, scale);
    a[2 * i + 1] = multiply2(__byte_perm(w[i], 0, 0x2301) & 0x807F807Fu, scale);
  }
}
__device__ __forceinline__ void decode_bfp4(u32 (&a)[8], u32 w0, u32 w1, u32 scale) {
  const u32 offset = multiply2(scale, 0x82888288u);  // -(2^-122 + 8 * 2^-129) * scale
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 w = i & 2 ? w1 : w0, v = i & 1 ? __byte_perm(w, 0, 0x2301) : w;
    a[2 * i] = fma2(mask_or(v, 0x000F000Fu, 0x02800280u), scale, offset);
    a[2 * i + 1] = multiply2(v & 0x80708070u, scale);
  }
}
// A bfloat16 with a 4-bit float code as its sign, lowest two exponent bits and highest fraction bit
// is the code's value times 2^-126. Three codes only need a rotation; the last has the remaining bits.
__device__ __forceinline__ u32 decode_float4(u32 w, int i, u32 scale) {
  const u32 v = i == 0 ? w : i == 1 ? w << 6 : __funnelshift_r(w, w, 4);
  if (i < 3) return multiply2(v & 0x81C081C0u, scale);
  return multiply2(mask_or(w >> 6, 0x01000100u, w << 2 & 0x80C080C0u), scale);
}
__device__ __forceinline__ void decode_word_mxfp4(u32 *a, u32 w, u32 scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = decode_float4(w, i, scale);
}
// Decode a pair of codes from a word, exactly; see coded_tiles.py. A bfloat16 with eight bits at its
// end is linear in them, because subnormal. Integers are in units that `gemv.py` multiplies by.
template <int F> __device__ __forceinline__ u32 decode_pair(u32 w, int i) {
  if (F == Q40) {
    const u32 v = (i & 2 ? w >> 8 : w) & (i & 1 ? 0x00F000F0u : 0x000F000Fu);
    return fma2(v, i & 1 ? 0x7D007D00u : 0x7F007F00u, 0xBE00BE00u);
  }
  if (F == Q80)
    return fma2(flip_and(i ? w >> 8 : w, 0x00800080u, 0x00FF00FFu), 0x7F007F00u, 0xC000C000u);
  const u32 v = i ? w : w << 8;
  return multiply2(mask_or(v, 0x80008000u, v >> 4 & 0x07F007F0u), 0x7B807B80u);
}
// Decode fragments for a block of columns, from words for rows g (w) and g + 8 (v).
template <int F>
__device__ __forceinline__ void decode_block(u32 (&top)[4], u32 (&low)[4], const u32 (&w)[4],
                                             const u32 (&v)[4], int i) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    top[k] = decode_pair<F>(w[k], i);
    low[k] = decode_pair<F>(v[k], i);
  }
}
// As above, times the scales of both rows: exact.
__device__ __forceinline__ void decode_nvfp4(u32 (&top)[4], u32 (&low)[4], const u32 (&w)[4],
                                             const u32 (&v)[4], const u32 *scales, int i) {
  const u32 first = scale_of_e5m3(scales[0], i), second = scale_of_e5m3(scales[1], i);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    top[k] = decode_float4(w[k], i, first);
    low[k] = decode_float4(v[k], i, second);
  }
}

// acc += R tiles x 128 columns for MT * 8 tokens, from a lane's offsets in shared memory.
template <int MT, int R>
__device__ __forceinline__ void multiply_bf16(float (&acc)[R][MT][4], u32 weight, u32 weight_odd,
                                              u32 x, u32 x_row8) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 a[2][R][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < R; ++r)
        read_matrices(a[half][r], (half ? weight_odd : weight) + r * step_bytes<BF16> + j * 1024);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      u32 b[4];
      read_matrices(b, x + m * x_row8 + j * 64);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int r = 0; r < R; ++r)
          mma(acc[r][m], a[half][r], b[2 * half], b[2 * half + 1]);
    }
  }
}
// Read 16 bytes of x. ONE: a single token is column 0 of the matrix unit's operand, which lanes 0 to
// 3 have. Other columns have any values, and their sums are not used.
template <bool ONE> __device__ __forceinline__ void read_x(u32 (&v)[4], u32 from) {
  if (!ONE) return read16(v, from);
  asm volatile("{.reg .pred reads;\nsetp.lt.u32 reads, %5, 4;\n"
               "@reads ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from), "r"(threadIdx.x & 31));
}
template <int F, int MT, int R, bool ONE>
__device__ __forceinline__ void multiply_blocks(float (&acc)[R][MT][4], u32 weight, u32 weight4,
                                                u32 x, u32 x_row8) {
  u32 exponents[R], w[R][4][4];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    exponents[r] = read4(weight4 + r * step_bytes<F>);
#pragma unroll
    for (int piece = 0; piece < pieces<F>; ++piece)
      read16(w[r][piece], weight + r * step_bytes<F> + piece * 512);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    u32 top[R][8], low[R][8];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const u32 e0 = scale_of(exponents[r], 2 * j), e1 = scale_of(exponents[r], 2 * j + 1);
      if (F == BFP8) {
        decode_bfp8(top[r], w[r][2 * j], e0);
        decode_bfp8(low[r], w[r][2 * j + 1], e1);
      } else if (F == MXFP4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          decode_word_mxfp4(top[r] + 4 * i, w[r][0][2 * j + i], e0);
          decode_word_mxfp4(low[r] + 4 * i, w[r][1][2 * j + i], e1);
        }
      } else {
        decode_bfp4(top[r], w[r][0][2 * j], w[r][0][2 * j + 1], e0);
        decode_bfp4(low[r], w[r][1][2 * j], w[r][1][2 * j + 1], e1);
      }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 b[4];
        read_x<ONE>(b, x + m * x_row8 + j * 128 + half * 16);
#pragma unroll
        for (int i = 0; i < 4; i += 2)
#pragma unroll
          for (int r = 0; r < R; ++r) {
            const int k = 4 * half + i;
            const u32 a[4] = {top[r][k], low[r][k], top[r][k + 1], low[r][k + 1]};
            mma(acc[r][m], a, b[i], b[i + 1]);
          }
      }
    }
  }
}
// acc += sums times row scales.
__device__ __forceinline__ void add_scaled(float (&acc)[4], const float (&sums)[4], float2 scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] = fmaf(sums[i], i & 2 ? scale.y : scale.x, acc[i]);
}
// As above, for code tiles.
template <int F, int MT, int R, bool ONE>
__device__ __forceinline__ void multiply_coded(float (&acc)[R][MT][4], u32 weight, u32 scales_at,
                                               u32 x, u32 x_row8) {
  constexpr int WHOLE = F == FP8 ? MT : 1;
  u32 w[R][4][4], scales[R][4];
  float sums[R][WHOLE][4];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (F == FP8 || F == NVFP4) {
      scales[r][0] = read4(scales_at + r * step_bytes<F>);
      scales[r][1] = read4(scales_at + r * step_bytes<F> + 32);
    } else {
      read_columns(scales[r], scales_at + r * step_bytes<F>);
    }
#pragma unroll
    for (int piece = 0; piece < pieces<F>; ++piece)
      read16(w[r][piece], weight + r * step_bytes<F> + piece * 512);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int half = F == Q40 ? 0 : j & 2, i = F == Q40 ? j : j & 1;
    u32 top[R][4], low[R][4];
    float2 scale[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if constexpr (F == NVFP4) {
        decode_nvfp4(top[r], low[r], w[r][0], w[r][1], scales[r], j);
        continue;
      }
      decode_block<F>(top[r], low[r], w[r][half], w[r][half + 1], i);
      if (F != FP8) scale[r] = halves(scales[r][j]);
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      u32 b[4];
      read_x<ONE>(b, x + m * x_row8 + j * 64);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float(&sum)[4] = is_summed<F> ? sums[r][F == FP8 ? m : 0] : acc[r][m];
        if (is_summed<F> && (F != FP8 || j == 0)) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          const u32 a[4] = {top[r][k], low[r][k], top[r][k + 1], low[r][k + 1]};
          mma(sum, a, b[k], b[k + 1]);
        }
        if (F == FP8 && j == 3)
          scale[r] = make_float2(__uint_as_float(scales[r][0]), __uint_as_float(scales[r][1]));
        if (is_summed<F> && (F != FP8 || j == 3)) add_scaled(acc[r][m], sum, scale[r]);
      }
    }
  }
}
template <int F, int MT, int R, bool ONE = false>
__device__ __forceinline__ void multiply_tiles(float (&acc)[R][MT][4], u32 weight, u32 weight4,
                                               u32 x, u32 x_row8) {
  if constexpr (F == BF16) multiply_bf16<MT, R>(acc, weight, weight4, x, x_row8);
  else if constexpr (is_coded<F>) multiply_coded<F, MT, R, ONE>(acc, weight, weight4, x, x_row8);
  else multiply_blocks<F, MT, R, ONE>(acc, weight, weight4, x, x_row8);
}

// Return the activation for a gate and its up, as `Finish` in experts_triton.py. P has its limit and
// its alpha.
template <class P> __device__ __forceinline__ float swiglu(const P &p, float gate, float up) {
  if (p.limit == 0.0f) return __fdividef(gate, 1.0f + __expf(-gate)) * up;
  gate = gate > p.limit ? p.limit : gate;
  up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
  return __fdividef(gate, 1.0f + __expf(-gate * p.alpha)) * (up + 1.0f);
}
// Multiply by a row's scale. A sum after it is not fused, so that kernels have equal bits.
__device__ __forceinline__ float scaled(const Product &p, int row, float sum) {
  return __fmul_rn(sum, (float)p.scale.rows[row]);
}
// Write two values of a tile: rows g and g + 8. With SWIGLU, they are gate and up. EARLY: `old` has
// the addends.
template <int F, bool EARLY = false>
__device__ __forceinline__ void finish(const Product &p, int token, int tile, int g, float top,
                                       float low, float2 old = {}) {
  if (token >= p.num_tokens) return;
  const int row = tile * 16 + g;
  if constexpr (F == NVFP4) {
    top = scaled(p, row, top);
    low = scaled(p, row + 8, low);
  } else {
    top *= p.scale.all;
    low *= p.scale.all;
  }
  if (p.bias) {
    if (row < p.num_rows) top += p.bias[row];
    if (row + 8 < p.num_rows) low += p.bias[row + 8];
  }
  if (p.epilogue == SWIGLU) {
    const float value = __fdividef(top, 1.0f + __expf(-top)) * low;
    if (row + 8 < p.num_rows)
      ((u16 *)p.out)[(size_t)token * p.out_stride + tile * 8 + g] = (u16)pack2(value, 0.0f);
    return;
  }
  float *out = (float *)p.out + (size_t)token * p.out_stride + row;
  if (row < p.num_rows) out[0] = p.epilogue == ADD ? (EARLY ? old.x : out[0]) + top : top;
  if (row + 8 < p.num_rows) out[8] = p.epilogue == ADD ? (EARLY ? old.y : out[8]) + low : low;
}
// Read the addends for `finish`, after `wait_for_inputs` and long before their use.
__device__ __forceinline__ float2 addends_of(const Product &p, int token, int tile, int g) {
  float2 old = make_float2(0.0f, 0.0f);
  if (p.epilogue != ADD || token >= p.num_tokens) return old;
  const int row = tile * 16 + g;
  const float *out = (const float *)p.out + (size_t)token * p.out_stride + row;
  if (row < p.num_rows) old.x = out[0];
  if (row + 8 < p.num_rows) old.y = out[8];
  return old;
}
