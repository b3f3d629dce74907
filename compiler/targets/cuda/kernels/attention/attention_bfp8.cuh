// bfp8 pages in attention: keys, values, queries and weights become float16.
//
// A mantissa is multiplied by its block's scale relative to the largest scale, which is 2^5 here
// and enters later in float32. The largest scale is the maximum over a warp's 16 positions and, for
// values, over its earlier positions in the split. A block with a scale 2^20 times smaller becomes
// 0.
#pragma once

#include "attention_pages.cuh"

constexpr int LARGEST = 15 + 5;  // as a float16 exponent

// Operations on pairs of float16.
__device__ __forceinline__ u32 half_multiply2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 half_fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Operations on both halves: maximum, and sum with a minimum of 0.
__device__ __forceinline__ u32 max2(u32 a, u32 b) {
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 add_above_zero2(u32 a, u32 b) {
  u32 d;
  asm("{\n.reg .b32 sum;\nadd.s16x2 sum, %1, %2;\nmax.s16x2 %0, sum, %3;\n}"
      : "=r"(d) : "r"(a), "r"(b), "r"(0));
  return d;
}
// (v & mask) ^ bits in one instruction.
__device__ __forceinline__ u32 mask_flip(u32 v, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(v), "r"(mask), "r"(bits));
  return d;
}

// Powers of two for the exponents in the low bytes of both halves, and their product with `-1152`.
struct Powers {
  u32 powers, below;
  __device__ __forceinline__ Powers() {}
  __device__ __forceinline__ Powers(u32 exponents, u32 shift)
      : powers(add_above_zero2(exponents, shift) << 10),
        below(half_multiply2(powers, 0xE480E480u)) {}
  // For a mantissa m, `0x6400 + (m ^ 128)` is the float16 value `1152 + m`.
  __device__ __forceinline__ u32 widen(u32 magic) const { return half_fma2(magic, powers, below); }
};

template <> struct Form<BFP8> {
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0,
                                                  u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  template <int D>
  static __device__ __forceinline__ void read_exponents(u32 (&v)[2], const u8 *from, bool wanted) {
    if (CHANNELS<D> == 128) {
      read<2>(v, from, wanted);
    } else if (D == 64) {
      read<1>(v, from, wanted);
    } else {
      v[0] = read2(from, wanted) | read2(from + 2, wanted) << 16;
      v[1] = read2(from + 4, wanted);
    }
  }
  // See `store_fresh`.
  template <int C>
  static __device__ __forceinline__ void store(float4 x, int lane, u8 *fresh, u8 *fresh_exponents,
                                               u8 *row, u8 *exponents) {
    const float values[4] = {x.x, x.y, x.z, x.w};
    int shared = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) shared = max(shared, __float_as_int(values[i]) >> 23 & 0xFF);
    shared = max(shared, __shfl_xor_sync(~0u, shared, 1));
    shared = max(shared, __shfl_xor_sync(~0u, shared, 2));
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bits = __float_as_int(values[i]), own = bits >> 23 & 0xFF;
      int magnitude = own == 0 ? 0 : (bits & 0x7FFFFF) | 0x800000;
      magnitude >>= min(shared - own, 31);
      magnitude = min((magnitude + (magnitude >> 17 & 1) + 0xFFFF) >> 17, 127);
      word |= (u32)((bits < 0 ? -magnitude : magnitude) & 0xFF) << 8 * i;
    }
    if (lane < C / 4) {
      *(u32 *)(fresh + lane * 4) = word;
      *(u32 *)(row + lane * 4) = word;
      if ((lane & 3) == 0) fresh_exponents[lane >> 2] = exponents[lane >> 2] = (u8)shared;
    }
  }
  // Scale a query so that its largest channel is in [2^14, 2^15), or smaller if it is below 2^-112.
  // A lane has four channels. Return the factor that undoes the scaling. Call it with whole warps.
  static __device__ __forceinline__ float scale_query(float4 &x) {
    const float peak = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
    const int exponent = __reduce_max_sync(~0u, __float_as_uint(peak)) >> 23;
    const int field = min(127 + 14 + 127 - exponent, 253);
    const float by = __int_as_float(field << 23);
    x = make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
    return __int_as_float((254 - field) << 23);
  }
  // Return a warp's largest exponent. Lanes with the same rows read different words.
  template <int ROWS>
  static __device__ __forceinline__ int largest_exponent(const u32 (&exponents)[ROWS][2],
                                                         int place) {
    u32 words[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) words[i] = place & 1 ? exponents[i][1] : exponents[i][0];
#pragma unroll
    for (int step = 1; step < ROWS; step <<= 1)
#pragma unroll
      for (int i = 0; i < ROWS; i += 2 * step)
        if (place & 2 * step) words[i] = words[i + step];
    const u32 all = max2(words[0], words[0] << 8);  // max2 compares halves by their upper bytes
    return __reduce_max_sync(~0u, max(all >> 24, all >> 8 & 0xFF));
  }
  // Distribute a slice's exponent words for four rows in a lane. Before the call, a lane has a word
  // with all exponents for row g / 2. Return the largest exponent.
  static __device__ __forceinline__ int share_exponents(u32 (&exponents)[4][2], u32 word,
                                                        int slice, int t) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      exponents[i][0] = __shfl_sync(~0u, word, (2 * i + (slice >> 1)) * 4 + t) >> (slice & 1) * 16;
    const u32 all = max2(word, word << 8);  // max2 compares halves by their upper bytes
    return __reduce_max_sync(~0u, max(all >> 24, all >> 8 & 0xFF));
  }
  // Return the offset for exponents in both halves of a word.
  static __device__ __forceinline__ u32 shift_of(int largest) {
    return (u32)((LARGEST - largest) & 0xFFFF) * 0x10001u;
  }
  // Return float32 2^(e - 133) for the largest exponent, divided by 2^5. 0 if e is below 12.
  static __device__ __forceinline__ float unit_of(int largest) {
    return __int_as_float(max(largest + 127 - 133 - (LARGEST - 15), 0) << 23);
  }
  // See `key_piece`. `words` has its two words, and `exponents` has a word.
  static __device__ __forceinline__ void widen_key(u32 (&out)[4], const u32 *words, u32 exponents,
                                                   int i, int t, u32 shift) {
    const u32 place = 0x4040 + (2 * (i & 1) + (t >> 1)) * 0x0101;
    const Powers scale(__byte_perm(exponents, 0, place), shift);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      out[j] = scale.widen(
          __byte_perm(words[j >> 1] ^ 0x80808080u, 0x64646464u, j & 1 ? 0x4342 : 0x4140));
  }
};

template <int D> struct Pairs<BFP8, D> {
  using S = Shape<BFP8, D>;
  const Values<BFP8, D> &v;
  Powers scales[2][S::V_PIECES];
  __device__ __forceinline__ Pairs(const Values<BFP8, D> &v, int largest, int g) : v(v) {
    const u32 shift = Form<BFP8>::shift_of(largest);
#pragma unroll
    for (int i = 0; i < S::V_PIECES; ++i) {
      const int word = S::V_WIDTH == 4 ? i >> 1 : i;
      const u32 place = S::V_WIDTH == 4 ? 2 * (i & 1) + (g >> 2) : g >> 1;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const u32 bytes = __byte_perm(v.exponents[2 * pair][word], v.exponents[2 * pair + 1][word],
                                      place * 0x1111 + 0x4400);
        scales[pair][i] = Powers(bytes & 0x00FF00FFu, shift);
      }
    }
  }
  __device__ __forceinline__ u32 of(int pair, int i) const {
    const u32 bytes = __byte_perm(v.words[2 * pair][i >> 2], v.words[2 * pair + 1][i >> 2],
                                  (i & 3) * 0x0011 + (4 + (i & 3)) * 0x1100);
    return scales[pair][i / S::V_WIDTH].widen(mask_flip(bytes, 0x00FF00FFu, 0x64806480u));
  }
};
