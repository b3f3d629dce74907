// Sixteen lanes on AVX2 and FMA: two registers each.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define TW_UNROLL _Pragma("GCC unroll 8")
#define TW_OPAQUE(pointer) asm("" : "+r"(pointer))  // its loads stay where they are

namespace {

constexpr int kIsa = 1, kTile = 6;
#define TW_OWN_DOTS

struct vf { __m256 a, b; };
struct vi { __m256i a, b; };
using Codes = vi;

inline vf zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline vf spread(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline vi ispread(int32_t x) { __m256i v = _mm256_set1_epi32(x); return {v, v}; }
inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline vi iload(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline void istore(void* p, vi x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
inline vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vf div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline vf larger(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline vf smaller(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline vf zero_if_less(vf x, vf y, vf no) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), no.a), _mm256_andnot_ps(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ), no.b)};
}
inline vf if_less(vf x, vf y, vf yes, vf no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline vi nearest(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline vi truncated(vf x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
inline vi bits(vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline vf of_bits(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
// Move lanes down by N. The last N lanes are unspecified.
template <int N> inline vf shifted(vf x) {
    if constexpr (N == 8) return {x.b, x.b};
    if constexpr (N == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), x.b};
    return {_mm256_permute_ps(x.a, N == 2 ? 0xee : 0xf5), x.b};
}
inline float first_lane(vf x) { return _mm256_cvtss_f32(x.a); }
inline vi iadd(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline vi iand(vi x, vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline vi ior(vi x, vi y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline vi imax(vi x, vi y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int N> inline vi left(vi x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> inline vi right(vi x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
template <int N> inline vi right_signed(vi x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }

inline __m256i low_halves(vi x) {  // the lower 16 bits of every lane, in order
    const __m256i pick = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,
                                          0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i a = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x.a, pick), 0x08);
    __m256i b = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x.b, pick), 0x08);
    return _mm256_inserti128_si256(a, _mm256_castsi256_si128(b), 1);
}
inline void store_halves(uint16_t* p, vi x) { _mm256_storeu_si256((__m256i*)p, low_halves(x)); }
inline void store_bytes(int8_t* p, vi x) {
    const __m256i low = _mm256_set1_epi32(0xff), halves = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    const __m256i pairs = _mm256_permute4x64_epi64(halves, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
inline vf float16s(const uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline vi widened(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}

inline vi repeated(const uint8_t* p) {
    __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    return {v, v};
}
inline vf float_at(const float* values, vi index) {
    const __m256 low = _mm256_load_ps(values), high = _mm256_load_ps(values + 8);
    const vi upper = left<28>(index);
    return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index.a), _mm256_permutevar8x32_ps(high, index.a), _mm256_castsi256_ps(upper.a)),
            _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index.b), _mm256_permutevar8x32_ps(high, index.b), _mm256_castsi256_ps(upper.b))};
}
inline vi looked_up(vi table, vi places) {
    return {_mm256_shuffle_epi8(table.a, places.a), _mm256_shuffle_epi8(table.b, places.b)};
}
// Alternate bytes from the lower or the upper halves of every 16.
inline vi in_turns_low(vi x, vi y) { return {_mm256_unpacklo_epi8(x.a, y.a), _mm256_unpacklo_epi8(x.b, y.b)}; }
inline vi in_turns_high(vi x, vi y) { return {_mm256_unpackhi_epi8(x.a, y.a), _mm256_unpackhi_epi8(x.b, y.b)}; }

inline int32_t sum_of_codes(const int8_t* codes) {  // sixteen
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(_mm_loadu_si128((const __m128i*)codes), _mm_set1_epi8((char)0x80)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

// Dot products between unsigned codes and int8, four columns per lane. 8-bit codes are multiplied as
// 16-bit integers: even bytes, then odd bytes. A prepared row has a word for the even columns and a
// word for the odd columns.
constexpr int kByteWords = 2;
inline void put_codes(void* to, int64_t index, const int8_t* codes, bool as_words) {
    __m128i v = _mm_loadu_si128((const __m128i*)codes);
    if (!as_words) return _mm_storeu_si128((__m128i*)to + index, v);
    v = _mm_shuffle_epi8(v, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    _mm256_storeu_si256((__m256i*)to + index, _mm256_cvtepi8_epi16(v));
}

// For 4-bit codes, a 16-bit accumulator fits a block.
inline int32_t start_word(int bits, int32_t less) {
    return bits == 4 ? (int32_t)((uint32_t)(uint16_t)(less / 2) * 0x10001u) : less;
}
inline __m256i dot_in_32(__m256i acc, __m256i w, __m256i x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
template <int BITS> inline Codes part_of(Codes w, int word) {
    if (BITS < 8) return w;
    const __m256i low = _mm256_set1_epi16(255);
    if (!word) return {_mm256_and_si256(w.a, low), _mm256_and_si256(w.b, low)};
    return {_mm256_srli_epi16(w.a, 8), _mm256_srli_epi16(w.b, 8)};
}
template <int BITS> inline vi dot_four(vi acc, Codes w, int32_t x) {
    const __m256i v = _mm256_set1_epi32(x);
    if constexpr (BITS == 8) acc = {_mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, v)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, v))};
    else if constexpr (BITS == 4) acc = {_mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, v)), _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, v))};
    else acc = {dot_in_32(acc.a, w.a, v), dot_in_32(acc.b, w.b, v)};
    asm("" : "+x"(acc.a), "+x"(acc.b));  // keeps the order: compilers spill reordered terms
    return acc;
}
template <int BITS> inline vi end_dot(vi sum) {
    const __m256i one = _mm256_set1_epi16(1);
    if constexpr (BITS == 4) return {_mm256_madd_epi16(sum.a, one), _mm256_madd_epi16(sum.b, one)};
    return sum;
}

// bfloat16 rows are stored as float: a broadcast from memory costs no conversion. The second of a
// pair is added first, each with one rounding, as in AVX-512's instruction.
constexpr int32_t kSignedRows = 24;  // fewest rows that pay for the tables of signed_avx2.inl
constexpr int kPairRows = 2, kPairWords = 2, kCodeRows = 6, kByteRows = 4, kCodePanels = 1;
using PairWord = float;
inline vf dot_second(vf acc, vi w, const float* x) { return fma(of_bits(iand(w, ispread((int32_t)0xffff0000))), spread(x[1]), acc); }
inline vf dot_first(vf acc, vi w, const float* x) { return fma(of_bits(left<16>(w)), spread(x[0]), acc); }
#define TW_OWN_CODES
// Floats of the signed bytes J, from a shuffle and a sum: shifts and conversions compete with
// products.
inline __m256 code_at(__m256i four, __m256i places) {
    const __m256i code = _mm256_shuffle_epi8(_mm256_xor_si256(four, _mm256_set1_epi32((int32_t)0x80808080u)), places);
    return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_or_si256(code, _mm256_set1_epi32(0x4b000000))), _mm256_set1_ps(0x1p23f + 128.0f));
}
template <int J> inline vf signed_code(vi four) {
    const __m256i places = _mm256_broadcastsi128_si256(_mm_setr_epi8(J, -1, -1, -1, J + 4, -1, -1, -1, J + 8, -1, -1, -1, J + 12, -1, -1, -1));
    return {code_at(four.a, places), code_at(four.b, places)};
}
struct FreshPair { vf first, second; };  // in registers only
inline FreshPair fresh_pair(vf first, vf second) { return {first, second}; }
inline vf dot_fresh(vf acc, FreshPair w, const float* x) { return fma(w.first, spread(x[0]), fma(w.second, spread(x[1]), acc)); }
inline void store_pair_words(void* p, int i, vf x, vi) { store((float*)p + 16 * i, x); }

}  // namespace
