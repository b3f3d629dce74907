// Sixteen lanes in plain C++, for any machine. Reference for the other instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define TW_UNROLL
#define TW_OPAQUE(pointer)

namespace {

constexpr int kIsa = 0, kTile = 2;

struct vf { float x[16]; };
struct vi { int32_t x[16]; };
using Codes = vi;

#define TW_LANES for (int i = 0; i < 16; i++)
#define TW_MAKE(type, value) type r; TW_LANES { r.x[i] = (value); } return r

inline vf spread(float x) { TW_MAKE(vf, x); }
inline vf zeros() { return spread(0.0f); }
inline vi ispread(int32_t x) { TW_MAKE(vi, x); }
inline vf load(const float* p) { vf r; std::memcpy(r.x, p, 64); return r; }
inline void store(float* p, vf x) { std::memcpy(p, x.x, 64); }
inline vi iload(const void* p) { vi r; std::memcpy(r.x, p, 64); return r; }
inline void istore(void* p, vi x) { std::memcpy(p, x.x, 64); }
inline vf add(vf a, vf b) { TW_MAKE(vf, a.x[i] + b.x[i]); }
inline vf sub(vf a, vf b) { TW_MAKE(vf, a.x[i] - b.x[i]); }
inline vf mul(vf a, vf b) { TW_MAKE(vf, a.x[i] * b.x[i]); }
inline vf div(vf a, vf b) { TW_MAKE(vf, a.x[i] / b.x[i]); }
inline vf fma(vf a, vf b, vf c) { TW_MAKE(vf, __builtin_fmaf(a.x[i], b.x[i], c.x[i])); }
inline vf larger(vf a, vf b) { TW_MAKE(vf, a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
inline vf smaller(vf a, vf b) { TW_MAKE(vf, a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
inline vf zero_if_less(vf a, vf b, vf no) { TW_MAKE(vf, a.x[i] < b.x[i] ? 0.0f : no.x[i]); }
inline vf if_less(vf a, vf b, vf yes, vf no) { TW_MAKE(vf, a.x[i] < b.x[i] ? yes.x[i] : no.x[i]); }
inline vf to_float(vi x) { TW_MAKE(vf, (float)x.x[i]); }
inline vi nearest(vf x) {  // on overflow the smallest integer, as on x86
    TW_MAKE(vi, x.x[i] > -2147483648.0f && x.x[i] < 2147483648.0f ? (int32_t)__builtin_rintf(x.x[i]) : INT32_MIN);
}
inline vi truncated(vf x) { TW_MAKE(vi, (int32_t)x.x[i]); }  // without overflow
inline vi bits(vf x) { vi r; std::memcpy(r.x, x.x, 64); return r; }
inline vf of_bits(vi x) { vf r; std::memcpy(r.x, x.x, 64); return r; }
// Move lanes down by N. The last N lanes are unspecified.
template <int N> inline vf shifted(vf v) { TW_MAKE(vf, v.x[(i + N) % 16]); }
inline float first_lane(vf v) { return v.x[0]; }
inline vi iadd(vi a, vi b) { TW_MAKE(vi, (int32_t)((uint32_t)a.x[i] + (uint32_t)b.x[i])); }
inline vi iand(vi a, vi b) { TW_MAKE(vi, a.x[i] & b.x[i]); }
inline vi ior(vi a, vi b) { TW_MAKE(vi, a.x[i] | b.x[i]); }
inline vi imax(vi a, vi b) { TW_MAKE(vi, a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
template <int N> inline vi left(vi v) { TW_MAKE(vi, (int32_t)((uint32_t)v.x[i] << N)); }
template <int N> inline vi right(vi v) { TW_MAKE(vi, (int32_t)((uint32_t)v.x[i] >> N)); }
template <int N> inline vi right_signed(vi v) { TW_MAKE(vi, v.x[i] >> N); }

inline void store_bytes(int8_t* p, vi x) { TW_LANES p[i] = (int8_t)(x.x[i] & 0xff); }
inline void store_halves(uint16_t* p, vi x) { TW_LANES p[i] = (uint16_t)(x.x[i] & 0xffff); }
inline float float16(uint32_t h) {
    uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu, u;
    if (rest < 0x400u) {  // zero and subnormal numbers
        float value = (float)rest * 0x1p-24f;
        std::memcpy(&u, &value, 4);
    } else {
        u = rest >= 0x7c00u ? (rest << 13) + 0x70000000u : (rest << 13) + 0x38000000u;
    }
    u |= sign;
    float value;
    std::memcpy(&value, &u, 4);
    return value;
}
inline vf float16s(const uint8_t* p) { TW_MAKE(vf, float16(p[2 * i] | (uint32_t)p[2 * i + 1] << 8)); }
inline vi widened(const uint8_t* p) { TW_MAKE(vi, p[i]); }

inline vi of_bytes(const uint8_t (&bytes)[64]) { vi r; std::memcpy(r.x, bytes, 64); return r; }
inline vi repeated(const uint8_t* p) {
    uint8_t r[64];
    for (int i = 0; i < 64; i++) r[i] = p[i % 16];
    return of_bytes(r);
}
inline vf float_at(const float* values, vi index) { TW_MAKE(vf, values[index.x[i]]); }
inline vi looked_up(vi table, vi places) {
    uint8_t t[64], at[64], r[64];
    std::memcpy(t, table.x, 64);
    std::memcpy(at, places.x, 64);
    for (int i = 0; i < 64; i++) r[i] = t[i / 16 * 16 + at[i] % 16];
    return of_bytes(r);
}
// Alternate bytes from the lower or the upper halves of every 16.
inline vi in_turns(vi a, vi b, int first) {
    uint8_t x[64], y[64], r[64];
    std::memcpy(x, a.x, 64);
    std::memcpy(y, b.x, 64);
    for (int part = 0; part < 64; part += 16)
        for (int i = 0; i < 8; i++) {
            r[part + 2 * i] = x[part + first + i];
            r[part + 2 * i + 1] = y[part + first + i];
        }
    return of_bytes(r);
}
inline vi in_turns_low(vi a, vi b) { return in_turns(a, b, 0); }
inline vi in_turns_high(vi a, vi b) { return in_turns(a, b, 8); }

inline int32_t dot_lane(int32_t codes, int32_t x, int32_t zero) {
    int32_t sum = 0;
    for (int j = 0; j < 32; j += 8)
        sum += ((int32_t)((uint32_t)codes >> j & 0xff) - zero) * (int8_t)((uint32_t)x >> j & 0xff);
    return sum;
}
inline int32_t sum_of_codes(const int8_t* codes) {  // sixteen
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += codes[i];
    return sum;
}

constexpr int kByteWords = 1;  // per four 8-bit codes in a row
inline void put_codes(void* to, int64_t index, const int8_t* codes, bool) { __builtin_memcpy((int8_t*)to + 16 * index, codes, 16); }
inline int32_t start_word(int bits, int32_t less) { return bits == 8 ? 0 : less; }
inline vi dot8(vi acc, Codes w, int32_t x) { TW_MAKE(vi, acc.x[i] + dot_lane(w.x[i], x, 128)); }
inline vi dot4(vi acc, Codes w, int32_t x) { TW_MAKE(vi, acc.x[i] + dot_lane(w.x[i], x, 0)); }
// As AVX-512's instruction: add the second of a pair first, with a rounding per addition.
inline vf dot_pair(vf acc, vi w, int32_t x) {
    vf x_low = of_bits(ispread((int32_t)((uint32_t)x << 16)));
    vf x_high = of_bits(ispread(x & (int32_t)0xffff0000));
    vf high = fma(of_bits(iand(w, ispread((int32_t)0xffff0000))), x_high, acc);
    return fma(of_bits(left<16>(w)), x_low, high);
}

#undef TW_MAKE
#undef TW_LANES

}  // namespace
