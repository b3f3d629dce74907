// PTX instructions for attention: barriers and stores within a cluster, barriers for some warps,
// and reads that bypass L1. Excludes pages.
#pragma once

#include "primitives.cuh"

typedef long long i64;

__device__ __forceinline__ void open_barrier(void *barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                   shared_address(barrier))
               : "memory");
}
// Invalidate a barrier so that it can be opened again. All reads of received data must be complete.
// Peers may send again after this block arrives at the cluster barrier.
__device__ __forceinline__ void close_barrier(void *barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];\nfence.acq_rel.cluster;" ::"r"(
                   shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void expect_bytes(void *barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_bytes(void *barrier) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                 "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(shared_address(barrier)) : "memory");
  } while (!done);
}
__device__ __forceinline__ u32 in_block(const void *p, int block) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there) : "r"(shared_address(p)), "r"(block));
  return there;
}
// Send floats to the same address in a block of the cluster. The block's barrier counts the bytes.
__device__ __forceinline__ void send(float4 *to, float4 v, void *barrier, int block = 0) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(in_block(to, block)), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w), "r"(in_block(barrier, block)) : "memory");
}
__device__ __forceinline__ void send(float2 *to, float2 v, void *barrier, int block = 0) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               ::"r"(in_block(to, block)), "f"(v.x), "f"(v.y), "r"(in_block(barrier, block))
               : "memory");
}
// Wait at a block's barrier `number`, below 15, for `threads` threads.
__device__ __forceinline__ void barrier_of(int number, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(number + 1), "r"(threads) : "memory");
}
// Read to `v`, bypassing L1. Without `wanted`, `v` keeps its value.
template <int WORDS>
__device__ __forceinline__ void read_over(u32 *v, const u8 *from, bool wanted) {
  if (WORDS == 4)
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
                 "@p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
                 : "l"(from), "r"((int)wanted) : "memory");
  else if (WORDS == 2)
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n"
                 "@p ld.global.cg.v2.u32 {%0, %1}, [%2];\n}"
                 : "+r"(v[0]), "+r"(v[1]) : "l"(from), "r"((int)wanted) : "memory");
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.cg.u32 %0, [%1];\n}"
                 : "+r"(v[0]) : "l"(from), "r"((int)wanted) : "memory");
}
// Read to `v`, bypassing L1. Without `wanted`, `v` becomes 0.
template <int WORDS> __device__ __forceinline__ void read(u32 *v, const u8 *from, bool wanted) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) v[i] = 0;
  read_over<WORDS>(v, from, wanted);
}
__device__ __forceinline__ u32 read2(const u8 *from, bool wanted) {
  u16 v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b16 %0, 0;\n"
               "@p ld.global.cg.u16 %0, [%1];\n}"
               : "=&h"(v) : "l"(from), "r"((int)wanted) : "memory");
  return v;
}
__device__ __forceinline__ i64 read_long(const i64 *from) {
  i64 v;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 read_floats(const float *from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 read_floats(const u16 *from) {  // four bfloat16
  u32 low, high;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(from)
               : "memory");
  return make_float4(__uint_as_float(low << 16), __uint_as_float(low & 0xFFFF0000u),
                     __uint_as_float(high << 16), __uint_as_float(high & 0xFFFF0000u));
}
__device__ __forceinline__ float read_float(const float *from) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float read_float(const u16 *from) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return value_of(v);
}
// Increment `counter` and return its previous value. Later arrivals see all writes of this block.
__device__ __forceinline__ u32 count_arrival(u32 *counter) {
  u32 before;
  asm volatile("fence.acq_rel.gpu;\natom.acq_rel.gpu.global.add.u32 %0, [%1], 1;\n"
               "fence.acq_rel.gpu;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
__device__ __forceinline__ float power_of_2(float x) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}
__device__ __forceinline__ u32 transpose(u32 v) {  // 8 x 8 values with 16 bits
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v));
  return d;
}
// Return cosine and sine within 1e-7 for angles up to 2^30. The reduction is in fp64.
__device__ __forceinline__ float2 cos_sin(float angle) {
  const double exact = angle, quarter = floor(exact * 0.6366197723675814 + 0.5);
  const float r = (float)(exact - quarter * 1.5707963267948966), square = r * r;
  float sin = square * (1.0f / 362880) - 1.0f / 5040;
  sin = (sin * square + 1.0f / 120) * square - 1.0f / 6;
  sin = r + r * square * sin;
  float cos = square * (1.0f / 40320) - 1.0f / 720;
  cos = (cos * square + 1.0f / 24) * square - 0.5f;
  cos = 1.0f + square * cos;
  const int turn = (int)quarter & 3;
  const float c = turn & 1 ? sin : cos, s = turn & 1 ? cos : sin;
  return make_float2(turn == 1 || turn == 2 ? -c : c, turn >= 2 ? -s : s);
}
