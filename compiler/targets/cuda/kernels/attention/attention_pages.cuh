// A warp's share of attention: 16 positions in a page. Lanes have keys and values in registers as A
// fragments for mma.m16n8k16, with permuted channels. Scores are `K q^T [16 positions, 8 heads]`.
// Sums are `V^T P^T [16 channels, 8 heads]`. With 256 channels, two warps have the same positions
// and half the channels each, and add their scores. Legend: `lane = 4 g + t`; NH is the head count
// in eights.

#pragma once

#include "attention_primitives.cuh"

// A page is an index or, in generated engines, the offset in `values` of its first element. Engines
// have a table with cosines and sines instead of frequencies.
#ifdef GENERATED
typedef i64 Page;
#define PAGE_BYTES 8
typedef u16 Turn;
#define FIRST_ROW(page) ((page) / D)
#else
typedef u32 Page;
#define PAGE_BYTES 4
typedef float Turn;
#define FIRST_ROW(page) (i64)(page) * page_rows
#endif

constexpr int BF16 = 0, BFP8 = 1;  // page formats
// Matrix multiplication operands. attention_bfp8.cuh has the version for bfp8.
template <int F> struct Form {
  static __device__ __forceinline__ u32 pack(float low, float high) { return pack2(low, high); }
  static __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0,
                                                  u32 b1) {
    mma(c, a, b0, b1);
  }
};

template <int D> constexpr int CHANNELS = D > 128 ? D / 2 : D;  // channels in a warp
template <int D> constexpr int PARTS = D / CHANNELS<D>;  // warps that share positions

// Rows have all channels. A vector (`piece`) is within a warp's channels.
template <int F, int D> struct Shape {
  static constexpr int BYTES = F == BF16 ? 2 : 1, ROW = D * BYTES, BLOCKS = D / 16;
  static constexpr int K_PIECES = CHANNELS<D> / 32, K_WORDS = 2 * BYTES;  // a vector has 8 channels
  static constexpr int V_WIDTH = D % 64 ? 4 : 8;  // channels in a vector
  static constexpr int V_PIECES = CHANNELS<D> / 8 / V_WIDTH, V_WORDS = V_WIDTH * BYTES / 4;
  static constexpr int Q_ROW = D * 2 + (D == 96 ? 0 : 64);  // eight lanes in different banks
};

// Peak without positions, and its substitute in subtractions.
__device__ __forceinline__ float nothing() { return __int_as_float(0xFF800000); }
__device__ __forceinline__ float finite(float peak) { return peak == nothing() ? 0.0f : peak; }

// A lane's part of a page. Keys: rows g and g + 8 in the warp, where vector i starts at channel
// `32 i + 8 t`. Values: rows `2 t + {0, 1, 8, 9}`, where vector i starts at channel
// `(8 i + g) V_WIDTH`. All exponents for these rows are included. Channels count from the warp's
// first channel, also in the pointers below. Hidden positions have exponents 0 and stale keys and
// values, with weights 0.
template <int F, int D> struct Keys {
  u32 words[2][CHANNELS<D> * Shape<F, D>::BYTES / 16], exponents[2][2];
};
template <int F, int D> struct Values {
  u32 words[4][CHANNELS<D> * Shape<F, D>::BYTES / 32], exponents[4][2];
};

template <int F, int D>
__device__ __forceinline__ void read_keys(Keys<F, D> &k, const u8 *values, const u8 *exponents,
                                          bool wanted, bool wanted8) {
  using S = Shape<F, D>;
#pragma unroll
  for (int i = 0; i < S::K_PIECES; ++i) {
    read_over<S::K_WORDS>(k.words[0] + i * S::K_WORDS, values + i * 32 * S::BYTES, wanted);
    read_over<S::K_WORDS>(k.words[1] + i * S::K_WORDS, values + 8 * S::ROW + i * 32 * S::BYTES,
                          wanted8);
  }
  if constexpr (F == BFP8) {
    Form<F>::template read_exponents<D>(k.exponents[0], exponents, wanted);
    Form<F>::template read_exponents<D>(k.exponents[1], exponents + 8 * S::BLOCKS, wanted8);
  }
}
// `wanted`: bit i selects row i in a lane. A slice of C channels has no exponents.
template <int F, int D, int C = D>
__device__ __forceinline__ void read_values(Values<F, C> &v, const u8 *values, const u8 *exponents,
                                            u32 wanted) {
  using S = Shape<F, C>;
  using Row = Shape<F, D>;
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    const int line = (row & 1) + (row >> 1) * 8;
    const bool here = wanted >> row & 1;
#pragma unroll
    for (int i = 0; i < S::V_PIECES; ++i)
      read_over<S::V_WORDS>(v.words[row] + i * S::V_WORDS,
                            values + line * Row::ROW + i * 8 * S::V_WIDTH * S::BYTES, here);
    if constexpr (F == BFP8 && C == D)
      Form<F>::template read_exponents<D>(v.exponents[row], exponents + line * S::BLOCKS, here);
  }
}
// Store four channels of a new key or value, in the cache's precision, in the page and in `fresh`.
// Call it with whole warps. Only lanes below C / 4 have channels.
template <int F, int C>
__device__ __forceinline__ void store_fresh(float4 x, int lane, u8 *fresh, u8 *fresh_exponents,
                                            u8 *row, u8 *exponents) {
  if constexpr (F == BFP8) {
    Form<F>::template store<C>(x, lane, fresh, fresh_exponents, row, exponents);
  } else {
    const uint2 words = make_uint2(pack2(x.x, x.y), pack2(x.z, x.w));
    if (lane >= C / 4) return;
    *(uint2 *)(fresh + lane * 8) = words;
    *(uint2 *)(row + lane * 8) = words;
  }
}
// Take this lane's part of the new token's row. In shared memory, the row has a page's layout.
template <int F, int D>
__device__ __forceinline__ void take_key(Keys<F, D> &k, int row, const u8 *fresh,
                                         const u32 *exponents, int t) {
  using S = Shape<F, D>;
#pragma unroll
  for (int i = 0; i < S::K_PIECES * S::K_WORDS; ++i)
    k.words[row][i] = *(const u32 *)(fresh + (i / S::K_WORDS * 32 + t * 8) * S::BYTES +
                                     i % S::K_WORDS * 4);
  if (F == BFP8) k.exponents[row][0] = exponents[0], k.exponents[row][1] = exponents[1];
}
template <int F, int D>
__device__ __forceinline__ void take_value(Values<F, D> &v, int row, const u8 *fresh,
                                           const u32 *exponents, int g) {
  using S = Shape<F, D>;
#pragma unroll
  for (int i = 0; i < S::V_PIECES * S::V_WORDS; ++i)
    v.words[row][i] = *(const u32 *)(fresh + (i / S::V_WORDS * 8 + g) * S::V_WIDTH * S::BYTES +
                                     i % S::V_WORDS * 4);
  if (F == BFP8) v.exponents[row][0] = exponents[0], v.exponents[row][1] = exponents[1];
}

// Return vector i of a key row as four pairs of channels.
template <int F, int D>
__device__ __forceinline__ void key_piece(u32 (&out)[4], const Keys<F, D> &k, int row, int i,
                                          int t, u32 shift) {
  const u32 *words = k.words[row] + i * Shape<F, D>::K_WORDS;
  if constexpr (F == BFP8) {
    Form<F>::widen_key(out, words, k.exponents[row][i >> 1], i, t, shift);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = words[j];
  }
}
// A lane's values in channel i as pairs: rows `2 pair` and `2 pair + 1`.
template <int F, int D> struct Pairs {
  const Values<F, D> &v;
  __device__ __forceinline__ Pairs(const Values<F, D> &v, int, int) : v(v) {}
  __device__ __forceinline__ u32 of(int pair, int i) const {
    return __byte_perm(v.words[2 * pair][i >> 1], v.words[2 * pair + 1][i >> 1],
                       i & 1 ? 0x7632 : 0x5410);
  }
};

// Online softmax in base 2 for a warp's positions. A lane has heads `8 h + 2 t + {0, 1}`. `sums`
// are by channel: `[h][i][{0, 1}]` below HALF, then `[h][i - HALF][{2, 3}]`. For bfp8, sums are
// relative to the exponent `largest`.
template <int D, int NH> struct Running {
  static constexpr int HALF = CHANNELS<D> / 16;
  float peak[NH][2], total[NH][2], sums[NH][HALF][4];
  int largest;
  __device__ __forceinline__ void clear() {
    largest = 0;
#pragma unroll
    for (int h = 0; h < NH; ++h) {
      peak[h][0] = peak[h][1] = nothing();
      total[h][0] = total[h][1] = 0.0f;
#pragma unroll
      for (int j = 0; j < HALF; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[h][j][i] = 0.0f;
    }
  }
};
// Return the largest exponent of a warp's values or keys; see `Form`.
template <int F, int ROWS>
__device__ __forceinline__ int largest_of(const u32 (&exponents)[ROWS][2], int place) {
  if constexpr (F == BFP8) return Form<F>::largest_exponent(exponents, place);
  return 0;
}
// Compute scores. `piece` returns vector i of a lane's key row, in float16 relative to `largest`.
template <int F, int D, int NH, class Piece>
__device__ __forceinline__ void score(float (&scores)[NH][4], Piece piece, int largest,
                                      const u8 *q, const float *q_units, int num_heads, int g,
                                      int t) {
  using S = Shape<F, D>;
  float odd[NH][4];
#pragma unroll
  for (int h = 0; h < NH; ++h)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[h][i] = odd[h][i] = 0.0f;
#pragma unroll
  for (int i = 0; i < S::K_PIECES; ++i) {
    u32 top[4], low[4];
    piece(top, 0, i);
    piece(low, 1, i);
    const u32 a[4] = {top[0], low[0], top[1], low[1]}, a_odd[4] = {top[2], low[2], top[3], low[3]};
#pragma unroll
    for (int h = 0; h < NH; ++h) {
      uint4 b = make_uint4(0, 0, 0, 0);
      if (h * 8 + g < num_heads)
        b = *(const uint4 *)(q + (h * 8 + g) * S::Q_ROW + i * 64 + t * 16);
      Form<F>::multiply(scores[h], a, b.x, b.y);
      Form<F>::multiply(odd[h], a_odd, b.z, b.w);
    }
  }
#pragma unroll
  for (int h = 0; h < NH; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[h][i] += odd[h][i];
    if constexpr (F == BFP8) {
      const float2 of_heads = *(const float2 *)(q_units + h * 8 + 2 * t);
      const float unit = Form<F>::unit_of(largest);
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[h][i] *= unit * (i & 1 ? of_heads.y : of_heads.x);
    }
  }
}
template <int F, int D, int NH>
__device__ __forceinline__ void score(float (&scores)[NH][4], const Keys<F, D> &k, const u8 *q,
                                      const float *q_units, int num_heads, int g, int t) {
  const int largest = largest_of<F>(k.exponents, t);
  u32 shift = 0;
  if constexpr (F == BFP8) shift = Form<F>::shift_of(largest);
  score<F, D, NH>(
      scores, [&](u32 (&out)[4], int row, int i) { key_piece(out, k, row, i, t, shift); }, largest,
      q, q_units, num_heads, g, t);
}
// Store scores over half the channels for the partner warp, then add the partner's scores. `own`
// and `theirs` have `[NH, 32]`. Pages alternate between two buffers, because a later page must not
// overwrite unread scores.
template <int NH>
__device__ __forceinline__ void leave_scores(const float (&scores)[NH][4], float4 *own, int lane) {
#pragma unroll
  for (int h = 0; h < NH; ++h)
    own[h * 32 + lane] = make_float4(scores[h][0], scores[h][1], scores[h][2], scores[h][3]);
}
template <int NH>
__device__ __forceinline__ void take_scores(float (&scores)[NH][4], const float4 *theirs, int pair,
                                            int lane) {
  barrier_of(pair, 64);
#pragma unroll
  for (int h = 0; h < NH; ++h) {
    const float4 other = theirs[h * 32 + lane];
    scores[h][0] += other.x, scores[h][1] += other.y;
    scores[h][2] += other.z, scores[h][3] += other.w;
  }
}
// Scale the scores and hide invisible positions. `peaks`: the largest scores in a page.
template <int NH>
__device__ __forceinline__ void mask(float (&scores)[NH][4], float (&peaks)[NH][2], float scale,
                                     bool valid, bool valid8) {
#pragma unroll
  for (int h = 0; h < NH; ++h)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scores[h][i] = valid ? scores[h][i] * scale : nothing();
      scores[h][2 + i] = valid8 ? scores[h][2 + i] * scale : nothing();
      peaks[h][i] = fmaxf(scores[h][i], scores[h][2 + i]);
#pragma unroll
      for (int offset = 4; offset <= 16; offset <<= 1)
        peaks[h][i] = fmaxf(peaks[h][i], __shfl_xor_sync(~0u, peaks[h][i], offset));
    }
}
// Convert scores to weights. `weights[h]` is P^T as B fragments. `fade`: factor for earlier sums.
template <int F, int D, int NH>
__device__ __forceinline__ void weigh(u32 (&weights)[NH][2], float (&fade)[NH][2],
                                      Running<D, NH> &run, const float (&scores)[NH][4],
                                      const float (&peaks)[NH][2]) {
#pragma unroll
  for (int h = 0; h < NH; ++h) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float peak = fmaxf(peaks[h][i], run.peak[h][i]);
      const float base = finite(peak);
      fade[h][i] = power_of_2(run.peak[h][i] - base);
      run.peak[h][i] = peak;
      w[i] = power_of_2(scores[h][i] - base);
      w[2 + i] = power_of_2(scores[h][2 + i] - base);
      run.total[h][i] = run.total[h][i] * fade[h][i] + (w[i] + w[2 + i]);
    }
    weights[h][0] = transpose(Form<F>::pack(w[0], w[1]));
    weights[h][1] = transpose(Form<F>::pack(w[2], w[3]));
  }
}
// Scale the sums and add the values with exponent `largest`. `tile` returns an A fragment of V^T.
template <int F, int D, int NH, class Tile>
__device__ __forceinline__ void add_tiles(Running<D, NH> &run, Tile tile, int largest,
                                          const u32 (&weights)[NH][2], float (&fade)[NH][2]) {
  float smaller = 1.0f;
  if constexpr (F == BFP8) {
    smaller = __int_as_float(max(127 + run.largest - largest, 0) << 23);
    run.largest = largest;
  }
#pragma unroll
  for (int h = 0; h < NH; ++h) {
    if (F == BFP8) fade[h][0] *= smaller, fade[h][1] *= smaller;
#pragma unroll
    for (int j = 0; j < CHANNELS<D> / 16; ++j) {
      run.sums[h][j][0] *= fade[h][0], run.sums[h][j][1] *= fade[h][1];
      run.sums[h][j][2] *= fade[h][0], run.sums[h][j][3] *= fade[h][1];
    }
  }
#pragma unroll
  for (int j = 0; j < CHANNELS<D> / 16; ++j) {
    u32 a[4];
    tile(a, j);
#pragma unroll
    for (int h = 0; h < NH; ++h)
      Form<F>::multiply(run.sums[h][j], a, weights[h][0], weights[h][1]);
  }
}
template <int F, int D>
__device__ __forceinline__ void tile_of(u32 (&a)[4], const Pairs<F, D> &pairs, int j) {
  const int low = j + CHANNELS<D> / 16;
  a[0] = pairs.of(0, j), a[1] = pairs.of(0, low), a[2] = pairs.of(1, j), a[3] = pairs.of(1, low);
}
template <int F, int D, int NH>
__device__ __forceinline__ void add_values(Running<D, NH> &run, const Values<F, D> &v,
                                           const u32 (&weights)[NH][2], float (&fade)[NH][2],
                                           int g) {
  const int largest = max(run.largest, largest_of<F>(v.exponents, g));
  const Pairs<F, D> pairs(v, largest, g);
  add_tiles<F, D, NH>(
      run, [&](u32 (&a)[4], int j) { tile_of(a, pairs, j); }, largest, weights, fade);
}
// Store a warp's sums in shared memory: `stats [NH * 8]` and its channels in `sums [heads, D]`.
// With two turns, the first has the even heads and the second the odd heads.
template <int F, int D, int NH, int TURNS>
__device__ __forceinline__ void leave(const Running<D, NH> &run, float2 *stats, float *sums,
                                      int num_heads, int g, int t, int turn) {
  static_assert(TURNS <= 2, "a lane has two heads of eight");
  constexpr int WIDTH = Shape<F, D>::V_WIDTH, HALF = CHANNELS<D> / 16;
  float unit = 1.0f;
  if constexpr (F == BFP8) unit = Form<F>::unit_of(run.largest);
#pragma unroll
  for (int h = 0; h < NH; ++h)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (TURNS == 2 && i != turn) continue;
      const int head = h * 8 + 2 * t + i;
      float total = run.total[h][i];
#pragma unroll
      for (int offset = 4; offset <= 16; offset <<= 1)
        total += __shfl_xor_sync(~0u, total, offset);
      if (g == 0) stats[head] = make_float2(run.peak[h][i], total);
      if (head >= num_heads) continue;
#pragma unroll
      for (int first = 0; first < 2 * HALF; first += 4) {
        float c[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          c[j] = first + j < HALF ? run.sums[h][(first + j) % HALF][i]
                                  : run.sums[h][(first + j) % HALF][2 + i];
        if (F == BFP8)
#pragma unroll
          for (int j = 0; j < 4; ++j) c[j] *= unit;
        *(float4 *)(sums + head / TURNS * D + (first / WIDTH * 8 + g) * WIDTH + first % WIDTH) =
            make_float4(c[0], c[1], c[2], c[3]);
      }
    }
}
// acc += weight * v, for four channels.
__device__ __forceinline__ void add(float4 &acc, float weight, float4 v) {
  acc.x += weight * v.x, acc.y += weight * v.y, acc.z += weight * v.z, acc.w += weight * v.w;
}
