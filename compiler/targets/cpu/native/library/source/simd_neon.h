// Sixteen lanes on ARM's NEON with dot products: four registers each.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#define TW_UNROLL _Pragma("GCC unroll 8")
#define TW_OPAQUE(pointer)

namespace {

constexpr int kIsa = 1, kTile = 2;

struct vf { float32x4_t x[4]; };
struct vi { int32x4_t x[4]; };
using Codes = vi;

#define TW_MAKE(type, value) type r; for (int i = 0; i < 4; i++) r.x[i] = (value); return r
#define TW_UNSIGNED(value) vreinterpretq_u32_s32(value)
#define TW_SIGNED(value) vreinterpretq_s32_u32(value)

inline vf spread(float x) { TW_MAKE(vf, vdupq_n_f32(x)); }
inline vf zeros() { return spread(0.0f); }
inline vi ispread(int32_t x) { TW_MAKE(vi, vdupq_n_s32(x)); }
inline vf load(const float* p) { TW_MAKE(vf, vld1q_f32(p + 4 * i)); }
inline void store(float* p, vf x) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.x[i]); }
inline vi iload(const void* p) { TW_MAKE(vi, vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p + 16 * i))); }
inline void istore(void* p, vi x) { for (int i = 0; i < 4; i++) vst1q_u8((uint8_t*)p + 16 * i, vreinterpretq_u8_s32(x.x[i])); }
inline vf add(vf a, vf b) { TW_MAKE(vf, vaddq_f32(a.x[i], b.x[i])); }
inline vf sub(vf a, vf b) { TW_MAKE(vf, vsubq_f32(a.x[i], b.x[i])); }
inline vf mul(vf a, vf b) { TW_MAKE(vf, vmulq_f32(a.x[i], b.x[i])); }
inline vf div(vf a, vf b) { TW_MAKE(vf, vdivq_f32(a.x[i], b.x[i])); }
inline vf fma(vf a, vf b, vf c) { TW_MAKE(vf, vfmaq_f32(c.x[i], a.x[i], b.x[i])); }
// The second if either is NaN, as on x86.
inline vf larger(vf a, vf b) { TW_MAKE(vf, vbslq_f32(vcgtq_f32(a.x[i], b.x[i]), a.x[i], b.x[i])); }
inline vf smaller(vf a, vf b) { TW_MAKE(vf, vbslq_f32(vcltq_f32(a.x[i], b.x[i]), a.x[i], b.x[i])); }
inline vf zero_if_less(vf a, vf b, vf no) { TW_MAKE(vf, vbslq_f32(vcltq_f32(a.x[i], b.x[i]), vdupq_n_f32(0.0f), no.x[i])); }
inline vf if_less(vf a, vf b, vf yes, vf no) { TW_MAKE(vf, vbslq_f32(vcltq_f32(a.x[i], b.x[i]), yes.x[i], no.x[i])); }
inline vf to_float(vi x) { TW_MAKE(vf, vcvtq_f32_s32(x.x[i])); }
inline vi nearest(vf x) {  // on overflow the smallest integer, as on x86
    const float32x4_t edge = vdupq_n_f32(2147483648.0f);
    TW_MAKE(vi, vbslq_s32(vandq_u32(vcltq_f32(x.x[i], edge), vcgtq_f32(x.x[i], vnegq_f32(edge))), vcvtnq_s32_f32(x.x[i]), vdupq_n_s32(INT32_MIN)));
}
inline vi truncated(vf x) { TW_MAKE(vi, vcvtq_s32_f32(x.x[i])); }  // without overflow
inline vi bits(vf x) { TW_MAKE(vi, vreinterpretq_s32_f32(x.x[i])); }
inline vf of_bits(vi x) { TW_MAKE(vf, vreinterpretq_f32_s32(x.x[i])); }
// Move lanes down by N. The last N lanes are unspecified.
template <int N> inline vf shifted(vf x) { TW_MAKE(vf, N >= 4 ? x.x[(i + N / 4) % 4] : vextq_f32(x.x[i], x.x[i], N % 4)); }
inline float first_lane(vf x) { return vgetq_lane_f32(x.x[0], 0); }
inline vi iadd(vi a, vi b) { TW_MAKE(vi, vaddq_s32(a.x[i], b.x[i])); }
inline vi iand(vi a, vi b) { TW_MAKE(vi, vandq_s32(a.x[i], b.x[i])); }
inline vi ior(vi a, vi b) { TW_MAKE(vi, vorrq_s32(a.x[i], b.x[i])); }
inline vi imax(vi a, vi b) { TW_MAKE(vi, vmaxq_s32(a.x[i], b.x[i])); }
template <int N> inline vi left(vi x) { TW_MAKE(vi, vshlq_n_s32(x.x[i], N)); }
template <int N> inline vi right(vi x) {
    if constexpr (N == 0) return x;
    else { TW_MAKE(vi, TW_SIGNED(vshrq_n_u32(TW_UNSIGNED(x.x[i]), N))); }
}
template <int N> inline vi right_signed(vi x) { TW_MAKE(vi, vshrq_n_s32(x.x[i], N)); }

inline void store_halves(uint16_t* p, vi x) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vmovn_u32(TW_UNSIGNED(x.x[i])));
}
inline void store_bytes(int8_t* p, vi x) {
    for (int i = 0; i < 2; i++) {
        uint16x8_t halves = vcombine_u16(vmovn_u32(TW_UNSIGNED(x.x[2 * i])), vmovn_u32(TW_UNSIGNED(x.x[2 * i + 1])));
        vst1_s8(p + 8 * i, vreinterpret_s8_u8(vmovn_u16(halves)));
    }
}
inline vf float16s(const uint8_t* p) { TW_MAKE(vf, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)))); }
inline vi widened(const uint8_t* p) {
    const uint8x16_t all = vld1q_u8(p);
    const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(all)), vmovl_u8(vget_high_u8(all))};
    TW_MAKE(vi, TW_SIGNED(vmovl_u16(i % 2 ? vget_high_u16(halves[i / 2]) : vget_low_u16(halves[i / 2]))));
}

#define TW_BYTES(value) vreinterpretq_u8_s32(value)
inline vi repeated(const uint8_t* p) { TW_MAKE(vi, vreinterpretq_s32_u8(vld1q_u8(p))); }
inline vf float_at(const float* values, vi index) {
    int32_t at[16];
    float result[16];
    istore(at, index);
    for (int i = 0; i < 16; i++) result[i] = values[at[i]];
    return load(result);
}
inline vi looked_up(vi table, vi places) { TW_MAKE(vi, vreinterpretq_s32_u8(vqtbl1q_u8(TW_BYTES(table.x[i]), TW_BYTES(places.x[i])))); }
// Alternate bytes from the lower or the upper halves of every 16.
inline vi in_turns_low(vi a, vi b) { TW_MAKE(vi, vreinterpretq_s32_u8(vzip1q_u8(TW_BYTES(a.x[i]), TW_BYTES(b.x[i])))); }
inline vi in_turns_high(vi a, vi b) { TW_MAKE(vi, vreinterpretq_s32_u8(vzip2q_u8(TW_BYTES(a.x[i]), TW_BYTES(b.x[i])))); }
#undef TW_BYTES

inline int32_t sum_of_codes(const int8_t* codes) {  // sixteen
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += codes[i];
    return sum;
}

// 8-bit codes become signed. Shorter codes are already positive.
constexpr int kByteWords = 1;  // per four 8-bit codes in a row
inline void put_codes(void* to, int64_t index, const int8_t* codes, bool) { __builtin_memcpy((int8_t*)to + 16 * index, codes, 16); }
inline int32_t start_word(int bits, int32_t less) { return bits == 8 ? 0 : less; }
inline vi dot8(vi acc, Codes w, int32_t x) {
    const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(x));
    TW_MAKE(vi, vdotq_s32(acc.x[i], veorq_s8(vreinterpretq_s8_s32(w.x[i]), vdupq_n_s8((int8_t)-128)), all));
}
inline vi dot4(vi acc, Codes w, int32_t x) {
    const int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(x));
    TW_MAKE(vi, vdotq_s32(acc.x[i], vreinterpretq_s8_s32(w.x[i]), all));
}
// As AVX-512's instruction: add the second of a pair first, with a rounding per addition.
inline vf dot_pair(vf acc, vi w, int32_t x) {
    vf x_low = of_bits(ispread((int32_t)((uint32_t)x << 16))), x_high = of_bits(ispread(x & (int32_t)0xffff0000));
    vf high = fma(of_bits(iand(w, ispread((int32_t)0xffff0000))), x_high, acc);
    return fma(of_bits(left<16>(w)), x_low, high);
}

#undef TW_MAKE
#undef TW_UNSIGNED
#undef TW_SIGNED

}  // namespace
