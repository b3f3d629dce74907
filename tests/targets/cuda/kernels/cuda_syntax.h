// CUDA C++ for `g++ -fsyntax-only`: the names that kernels use, without definitions.
#include <cmath>
#include <cstddef>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __align__(size) __attribute__((aligned(size)))
#define __launch_bounds__(...)
#define __maxnreg__(...)

template <class T> struct Pair {
  T x, y;
};
template <class T> struct Four {
  T x, y, z, w;
};
using float2 = Pair<float>;
using uint2 = Pair<unsigned>;
using float4 = Four<float>;
using uint4 = Four<unsigned>;
float2 make_float2(float, float);
uint2 make_uint2(unsigned, unsigned);
float4 make_float4(float, float, float, float);
uint4 make_uint4(unsigned, unsigned, unsigned, unsigned);

struct LaunchIndex {
  unsigned x, y, z;
};
extern const LaunchIndex threadIdx, blockIdx, blockDim, gridDim;

template <class A, class B> constexpr auto min(A a, B b) -> decltype(a + b);
template <class A, class B> constexpr auto max(A a, B b) -> decltype(a + b);
void __syncthreads(), __syncwarp(unsigned = 0), __threadfence(), __threadfence_system();
template <class T> T __shfl_sync(unsigned, T, int, int = 32);
template <class T> T __shfl_xor_sync(unsigned, T, int, int = 32);
template <class T> T __shfl_up_sync(unsigned, T, unsigned, int = 32);
unsigned __ballot_sync(unsigned, int), __reduce_max_sync(unsigned, unsigned);
unsigned __reduce_min_sync(unsigned, unsigned);
int __any_sync(unsigned, int), __popc(unsigned), __ffs(int);
unsigned __byte_perm(unsigned, unsigned, unsigned), __funnelshift_r(unsigned, unsigned, unsigned);
float __uint_as_float(unsigned), __int_as_float(int);
unsigned __float_as_uint(float);
int __float_as_int(float);
float __fmul_rn(float, float), __fdividef(float, float), __expf(float), rsqrtf(float);
std::size_t __cvta_generic_to_shared(const void *);
