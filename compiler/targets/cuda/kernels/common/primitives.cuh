// PTX instructions: copies, clusters and matrix units. Excludes weight formats.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
// L2 cache policies: default, evicted first, evicted last.
constexpr u64 USUAL = 0x1000000000000000ull, ONCE = 0x12F0000000000000ull,
              OFTEN = 0x14F0000000000000ull;

__device__ __forceinline__ void wait_for_inputs() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void release_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ u32 shared_address(const void *p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy16(u32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
// As above, evicted first from the L2 cache.
__device__ __forceinline__ void copy16_once(u32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(from), "l"(ONCE)
               : "memory");
}
// As above, or 16 bytes of zeros.
__device__ __forceinline__ void copy16_or_zero(u32 to, const void *from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Read through the L2, bypassing stale lines in L1. Use this for reads before `wait_for_inputs`
// when the writer has ended.
__device__ __forceinline__ u32 read_past4(const void *from) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint4 read_past16(const void *from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void read16(u32 (&v)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from));
}
__device__ __forceinline__ void read8(u32 (&v)[2], u32 from) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(from));
}
__device__ __forceinline__ u32 read4(u32 from) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}
// Load four 8 x 8 matrices in bfloat16. Lanes 8 i .. 8 i + 7 have the row addresses of matrix i.
__device__ __forceinline__ void read_matrices(u32 (&v)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from));
}
// The same, transposed: a lane has two values of a column in every matrix.
__device__ __forceinline__ void read_columns(u32 (&v)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from));
}
// Two fp16 numbers as float32.
__device__ __forceinline__ float2 halves(u32 v) {
  float2 d;
  asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;}" : "=f"(d.x), "=f"(d.y) : "r"(v));
  return d;
}
__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 both_halves(u32 v, bool is_high) {
  u32 d;
  if (is_high)
    asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};}"
        : "=r"(d) : "r"(v));
  else
    asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};}"
        : "=r"(d) : "r"(v));
  return d;
}
// (v & mask) | bits in one instruction. The compiler would emit two for constants.
__device__ __forceinline__ u32 mask_or(u32 v, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(v), "r"(mask), "r"(bits));
  return d;
}
__device__ __forceinline__ u32 flip_and(u32 v, u32 bits, u32 mask) {  // (v ^ bits) & mask
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(d) : "r"(v), "r"(bits), "r"(mask));
  return d;
}
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
// Value passed between kernels: float32, or bfloat16 in generated engines (GENERATED).
#ifdef GENERATED
typedef u16 Value;
__device__ __forceinline__ Value to_value(float v) { return (u16)pack2(v, 0.0f); }
#else
typedef float Value;
__device__ __forceinline__ Value to_value(float v) { return v; }
#endif
__device__ __forceinline__ float value_of(float v) { return v; }
__device__ __forceinline__ float value_of(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Round to the nearest TF32, halves away from zero. The matrix unit would truncate.
__device__ __forceinline__ float to_tf32(float v) {
  u32 d;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(d) : "f"(v));
  return __uint_as_float(d);
}
__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float read_of_rank(u32 address, int rank) {
  u32 there;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there));
  return value;
}
// Store to the same address in the cluster's first block.
__device__ __forceinline__ void put_in_first_block(short *place, short value) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(shared_address(place)));
  asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(there), "h"(value) : "memory");
}
// Set bits in the first block's word.
__device__ __forceinline__ void set_in_first_block(u32 *word, u32 bits) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(shared_address(word)));
  asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(there), "r"(bits)
               : "memory");
}
// Arrive without order: other blocks must not read earlier writes, and no write to another block may
// be pending. Values read from other blocks must be in registers.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
