// Sixteen lanes on AVX-512 with VNNI and BF16: one register each.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define TW_UNROLL _Pragma("GCC unroll 8")
#define TW_OPAQUE(pointer)

namespace {

constexpr int kIsa = 2, kTile = 6;

using vf = __m512;
using vi = __m512i;
using Codes = __m512i;  // 16 rows with 4 unsigned bytes

inline vf zeros() { return _mm512_setzero_ps(); }
inline vf spread(float x) { return _mm512_set1_ps(x); }
inline vi ispread(int32_t x) { return _mm512_set1_epi32(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vi iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, vi x) { _mm512_storeu_si512(p, x); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf smaller(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf zero_if_less(vf a, vf b, vf no) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), no); }
inline vf if_less(vf a, vf b, vf yes, vf no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }
inline vi nearest(vf x) { return _mm512_cvtps_epi32(x); }
inline vi truncated(vf x) { return _mm512_cvttps_epi32(x); }
inline vi bits(vf x) { return _mm512_castps_si512(x); }
inline vf of_bits(vi x) { return _mm512_castsi512_ps(x); }
// Move lanes down by N. The last N lanes are unspecified.
template <int N> inline vf shifted(vf x) { return of_bits(_mm512_alignr_epi32(bits(x), bits(x), N)); }
inline float first_lane(vf x) { return _mm512_cvtss_f32(x); }
inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi ior(vi a, vi b) { return _mm512_or_si512(a, b); }
inline vi imax(vi a, vi b) { return _mm512_max_epi32(a, b); }
template <int N> inline vi left(vi x) { return _mm512_slli_epi32(x, N); }
template <int N> inline vi right(vi x) { return _mm512_srli_epi32(x, N); }
template <int N> inline vi right_signed(vi x) { return _mm512_srai_epi32(x, N); }

inline void store_bytes(int8_t* p, vi x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
inline void store_halves(uint16_t* p, vi x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(x)); }
inline vf float16s(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline vi widened(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }

inline vi repeated(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline vf float_at(const float* values, vi index) { return _mm512_permutexvar_ps(index, _mm512_load_ps(values)); }
inline vi looked_up(vi table, vi places) { return _mm512_shuffle_epi8(table, places); }
// Alternate bytes from the lower or the upper halves of every 16.
inline vi in_turns_low(vi a, vi b) { return _mm512_unpacklo_epi8(a, b); }
inline vi in_turns_high(vi a, vi b) { return _mm512_unpackhi_epi8(a, b); }

inline int32_t sum_of_codes(const int8_t* codes) {  // sixteen
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(_mm_loadu_si128((const __m128i*)codes), _mm_set1_epi8((char)0x80)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

// Sums of four products between unsigned codes and int8.
constexpr int kByteWords = 1;  // per four 8-bit codes in a row
inline void put_codes(void* to, int64_t index, const int8_t* codes, bool) { __builtin_memcpy((int8_t*)to + 16 * index, codes, 16); }
inline int32_t start_word(int, int32_t less) { return less; }
inline vi dot8(vi acc, Codes w, int32_t x) { return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)); }
inline vi dot4(vi acc, Codes w, int32_t x) { return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)); }
inline vf dot_pair(vf acc, vi w, int32_t x) {
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
}

}  // namespace
