// A warp on the CPU: 32 threads in step, for the inner loops of tiles.cuh. Replaces primitives.cuh.
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Index {
  int x;
};
struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

thread_local Index threadIdx;
alignas(16) u8 shared[1 << 16];
std::barrier<> step(32);

template <class To, class From> To bits_of(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &v, sizeof(to));
  return to;
}
inline float __uint_as_float(u32 v) { return bits_of<float>(v); }
inline u32 __float_as_uint(float v) { return bits_of<u32>(v); }
inline float half_of(u32 pair, int i) { return __uint_as_float(i ? pair & 0xFFFF0000u : pair << 16); }
inline float value_of_fp16(u16 v) {
  const int exponent = v >> 10 & 31, fraction = v & 1023;
  const float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25)
                              : std::ldexp((float)fraction, -24);
  return v >> 15 ? -size : size;
}
// All products and sums of decoders are exact in bfloat16. Others end the test.
inline u32 exact_pair(float low, float high) {
  if ((__float_as_uint(low) | __float_as_uint(high)) & 0xFFFF) std::puts("not exact"), std::exit(1);
  return __float_as_uint(low) >> 16 | __float_as_uint(high);
}
inline u32 fma2(u32 a, u32 b, u32 c) {
  return exact_pair(std::fma(half_of(a, 0), half_of(b, 0), half_of(c, 0)),
                    std::fma(half_of(a, 1), half_of(b, 1), half_of(c, 1)));
}
inline u32 multiply2(u32 a, u32 b) { return fma2(a, b, 0x80008000u); }
inline u32 mask_or(u32 v, u32 mask, u32 bits) { return (v & mask) | bits; }
inline u32 flip_and(u32 v, u32 bits, u32 mask) { return (v ^ bits) & mask; }
inline u32 both_halves(u32 v, bool is_high) {
  return is_high ? v >> 16 | (v & 0xFFFF0000u) : v << 16 | (v & 0xFFFF);
}
inline u32 __funnelshift_r(u32 low, u32 high, int by) {
  return (u32)(((unsigned long long)high << 32 | low) >> by);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline u32 pack2(float, float) { return 0; }
template <class T> T __ldg(const T *from) { return *from; }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}
inline float2 halves(u32 v) { return {value_of_fp16((u16)v), value_of_fp16((u16)(v >> 16))}; }
inline void read16(u32 (&v)[4], u32 from) { std::memcpy(v, shared + from, 16); }
inline u32 read4(u32 from) {
  u32 v;
  std::memcpy(&v, shared + from, 4);
  return v;
}
inline void read_matrices(u32 (&)[4], u32) {}
inline void copy16(u32, const void *) {}
inline void copy16_once(u32, const void *) {}
inline void copy4(u32, const void *) {}
inline void release_dependents() {}

u32 addresses[32];
inline void read_columns(u32 (&v)[4], u32 from) {
  const int lane = threadIdx.x;
  addresses[lane] = from;
  step.arrive_and_wait();
  for (int matrix = 0; matrix < 4; ++matrix) {
    v[matrix] = 0;
    for (int i = 0; i < 2; ++i) {
      u16 value;
      std::memcpy(&value, shared + addresses[8 * matrix + 2 * (lane & 3) + i] + 2 * (lane >> 2), 2);
      v[matrix] |= (u32)value << 16 * i;
    }
  }
  step.arrive_and_wait();
}
u32 first[32][4], second[32][2];
inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int lane = threadIdx.x, g = lane >> 2, t = lane & 3;
  std::memcpy(first[lane], a, 16);
  second[lane][0] = b0, second[lane][1] = b1;
  step.arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const float weight = half_of(first[4 * g + (k >> 1 & 3)][(i >> 1) + 2 * (k >> 3)], k & 1);
      const float x = half_of(second[4 * (2 * t + (i & 1)) + (k >> 1 & 3)][k >> 3], k & 1);
      sum += (double)weight * x;
    }
    c[i] = (float)sum;
  }
  step.arrive_and_wait();
}
