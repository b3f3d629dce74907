"""A decode step's products in CUDA C++: weights stream through shared memory by asynchronous
copies, several steps ahead, and the first of them before the kernel in front has ended.
"""

from __future__ import annotations

PRODUCTS = r"""
// y[M, N] = x[M, K] W[N, K]^T of 1 to 32 rows of x, in 16 bits, summed in float32 by
// mma.m16n8k16: 16 rows of W (a tile) by 8 rows of x. K goes in steps of 128 columns. A weight
// of few tiles is cut into 8 slices of K, so that every warp of the device has some of it.
typedef unsigned int u32; typedef unsigned short u16;
#define INLINE __device__ __forceinline__
#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; ++i)
constexpr int ADD = 1, SWIGLU = 2;  // what becomes of y; 0: it is stored
constexpr int SLICES = 8, STEP = 128, STEP_BYTES = 16 * STEP * 2, X_PADDING = 8;
struct Product {
  const char *weight;   // [N, K], zeros behind, up to a whole tile
  const u16 *x;         // [M, K]
  const void *norm;     // [K] of an RMSNorm of x (M = 1), or null
  u16 *out;             // [M, num_outputs]
  int num_rows, num_outputs, num_steps, num_tiles, num_slices, epilogue;
  int norm_is_float; float eps;
};
INLINE void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE void release_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
INLINE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
INLINE void copy16(u32 to, const void *p) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(p) : "memory");
}
INLINE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> INLINE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Four 8 x 8 matrices: lanes 8 i .. 8 i + 7 give the addresses of the rows of matrix i.
INLINE void read_matrices(u32 (&v)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from));
}
#if HALF
#define TYPE "f16"
INLINE float widen(u16 v) { float d; asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(v)); return d; }
#else
#define TYPE "bf16"
INLINE float widen(u16 v) { return __uint_as_float((u32)v << 16); }
#endif
INLINE u16 narrow(float v) {
  u16 d; asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(d) : "f"(v)); return d;
}
INLINE float rounded(float v) { return widen(narrow(v)); }
INLINE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// A lane's way through the tiles that its warp fetches. A tile's upper eight rows are the lower
// ones' neighbours, or where gates and ups are multiplied the ups of eight gates.
struct Source {
  const char *low, *high;
  size_t tile_bytes;  // from a tile's first row to the next tile's
  u32 to;             // the lane's place in a step of shared memory
  INLINE Source(const Product &p, int tile, int step, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const size_t row = (size_t)p.num_steps * (STEP * 2);
    tile_bytes = (p.epilogue == SWIGLU ? 8 : 16) * row;
    low = p.weight + tile * tile_bytes + g * row + step * (STEP * 2) + t * 16;
    high = low + (p.epilogue == SWIGLU ? p.num_outputs : 8) * row;
    to = (g * 4 + (t ^ (g >> 1))) * 16;  // chunk t of eight rows: in eight banks
  }
  INLINE void fetch(u32 place) {
    EACH(piece, 8) copy16(place + to + piece * 512, (piece & 1 ? high : low) + (piece >> 1) * 64);
    skip(STEP * 2);
  }
  INLINE void skip(long long bytes) { low += bytes, high += bytes; }
};
// Where a lane reads a step's weights, and x, in shared memory.
INLINE u32 weight_offset(int lane) {
  const int row = lane & 7, matrix = lane >> 3;
  return (matrix & 1) * 512 + (row * 4 + ((matrix >> 1) ^ (row >> 1))) * 16;
}
INLINE u32 x_offset(int lane, int row_bytes) { return (lane & 7) * row_bytes + (lane >> 3) * 16; }
// sums += TILES tiles x 128 columns of EIGHTS * 8 rows, from a lane's places in shared memory.
template <int EIGHTS, int TILES>
INLINE void multiply_step(float (&sums)[TILES][EIGHTS][4], u32 weight, u32 x, u32 x_eight) {
  EACH(j, 4) {
    u32 a[2][TILES][4];
    EACH(half, 2) EACH(r, TILES)
        read_matrices(a[half][r], (weight ^ half * 32) + r * STEP_BYTES + j * 1024);
    EACH(m, EIGHTS) {
      u32 b[4]; read_matrices(b, x + m * x_eight + j * 64);
      EACH(half, 2) EACH(r, TILES) multiply(sums[r][m], a[half][r], b[2 * half], b[2 * half + 1]);
    }
  }
}
// Outputs g and g + 8 of a tile, or gate g and its up; rounded where plain torch rounds.
INLINE void finish(const Product &p, int row, int tile, int g, float low, float high) {
  if (row >= p.num_rows) return;
  u16 *out = p.out + (size_t)row * p.num_outputs;
  if (p.epilogue == SWIGLU) {
    const float gate = rounded(low), up = rounded(high);
    out[tile * 8 + g] = narrow(rounded(gate / (1.0f + __expf(-gate))) * up);
    return;
  }
  const int left = p.num_outputs - tile * 16 - g;  // the last tile may end in rows of zeros
  out += tile * 16 + g;
  if (left > 0) out[0] = p.epilogue == ADD ? narrow(widen(out[0]) + rounded(low)) : narrow(low);
  if (left > 8) out[8] = p.epilogue == ADD ? narrow(widen(out[8]) + rounded(high)) : narrow(high);
}
INLINE float factor(const Product &p, int at) {
  return p.norm_is_float ? ((const float *)p.norm)[at] : widen(((const u16 *)p.norm)[at]);
}
// The RMSNorm of one row by 256 threads, four columns at a time.
INLINE void normalise(const Product &p, u16 *to) {
  __shared__ float parts[8]; constexpr int MOST = 8;
  const int num_columns = p.num_steps * STEP, first = threadIdx.x * 4;
  ushort4 values[MOST];
  for (int at = threadIdx.x * 32; at < num_columns; at += 256 * 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"((const u16 *)p.norm + (at << p.norm_is_float)));
  wait_for_inputs();
  float sum = 0.0f;
  EACH(i, MOST)
    if (first + i * 1024 < num_columns) values[i] = *(const ushort4 *)(p.x + first + i * 1024);
  EACH(i, MOST) if (first + i * 1024 < num_columns) {
      const float a = widen(values[i].x), b = widen(values[i].y);
      const float c = widen(values[i].z), d = widen(values[i].w);
      sum += a * a + b * b + c * c + d * d;
    }
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = 0.0f;
  EACH(i, 8) sum += parts[i];
  const float scale = rsqrtf(sum / num_columns + p.eps);
  EACH(i, MOST) {
    const int at = first + i * 1024;
    if (at < num_columns) {
      u16 v[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
      EACH(j, 4) v[j] = narrow(rounded(widen(v[j]) * scale) * factor(p, at + j));
      *(ushort4 *)(to + at) = make_ushort4(v[0], v[1], v[2], v[3]);
    }
  }
}
// One row of x, whole in shared memory. A block's eight warps walk over tiles: together, each on
// its slice of K, or each on tiles of its own. DEPTH steps are on their way to a warp.
template <int DEPTH> INLINE void one_row(const Product &p) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float slices[2][SLICES][16];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool is_cut = p.num_slices > 1;
  const int first = is_cut ? warp * p.num_steps / SLICES : 0;
  const int num_steps = (is_cut ? (warp + 1) * p.num_steps / SLICES : p.num_steps) - first;
  const int tile_stride = gridDim.x * (is_cut ? 1 : 8);
  int tile = blockIdx.x + (is_cut ? 0 : gridDim.x * warp), turn = 0;
  u16 *x = (u16 *)memory;
  const u32 ring = shared_address(memory) + p.num_steps * (STEP * 2) + warp * DEPTH * STEP_BYTES;
  Source source(p, tile, first, lane);
  const long long jump = tile_stride * source.tile_bytes - num_steps * (STEP * 2);
  int next_tile = num_steps ? tile : p.num_tiles, next_step = 0;
  auto fetch = [&](int slot) {
    if (next_tile < p.num_tiles) {
      source.fetch(ring + slot * STEP_BYTES);
      if (++next_step == num_steps) { next_step = 0, next_tile += tile_stride; source.skip(jump); }
    }
    commit();
  };
  release_dependents();
  EACH(slot, DEPTH) fetch(slot);
  if (p.norm) { normalise(p, x); } else {
    wait_for_inputs();
    for (int at = threadIdx.x * 8; at < p.num_steps * STEP; at += 256 * 8)
      *(uint4 *)(x + at) = *(const uint4 *)(p.x + at);
  }
  __syncthreads();
  const u32 from = ring + weight_offset(lane);
  const u32 x_first = shared_address(memory) + x_offset(lane, 0) + first * (STEP * 2);
  float sums[1][1][4] = {};
  auto finish_tile = [&] {
    float(*partial)[16] = slices[turn & 1];
    if (!is_cut) {
      if ((lane & 3) == 0) finish(p, 0, tile, lane >> 2, sums[0][0][0], sums[0][0][2]);
    } else {
      if ((lane & 3) == 0) {
        partial[warp][lane >> 2] = sums[0][0][0];
        partial[warp][8 + (lane >> 2)] = sums[0][0][2];
      }
      __syncthreads();  // the other buffer is free again: its reader has passed this barrier too
      if (warp == (turn & 7) && lane < 8) {
        float low = 0.0f, high = 0.0f;
        EACH(slice, SLICES) low += partial[slice][lane], high += partial[slice][lane + 8];
        finish(p, 0, tile, lane, low, high);
      }
    }
    sums[0][0][0] = sums[0][0][1] = sums[0][0][2] = sums[0][0][3] = 0.0f;
    tile += tile_stride, ++turn;
  };
  while (!num_steps && tile < p.num_tiles) finish_tile();
  for (int step = 0; tile < p.num_tiles;) {
    EACH(slot, DEPTH) {
      wait_copies<DEPTH - 1>();
      __syncwarp();  // its lanes read each other's pieces
      multiply_step<1, 1>(sums, from + slot * STEP_BYTES, x_first + step * (STEP * 2), 0);
      __syncwarp();
      fetch(slot);
      if (++step == num_steps) { step = 0; finish_tile(); if (tile >= p.num_tiles) break; }
    }
  }
}
INLINE float read_of_rank(u32 address, int rank) {
  u32 there; float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there));
  return value;
}
INLINE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Up to EIGHTS * 8 rows of x. A warp owns TILES tiles; DEPTH - 1 steps of x and of weights are on
// their way. Where K is cut, the 8 blocks along y, a cluster, take a slice each, and then add up
// their shares of the rows from each other's shared memory.
template <int EIGHTS, int TILES, int DEPTH> INLINE void some_rows(const Product &p) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int X_ROW = (STEP + X_PADDING) * 2, X_BYTES = EIGHTS * 8 * X_ROW;
  constexpr int W_BYTES = TILES * STEP_BYTES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, num_warps = blockDim.x >> 5;
  const int tile = (blockIdx.x * num_warps + warp) * TILES, g = lane >> 2, t = lane & 3;
  const int slice = blockIdx.y, num_slices = gridDim.y, first = slice * p.num_steps / num_slices;
  const int num_steps = (slice + 1) * p.num_steps / num_slices - first;
  const u32 x_ring = shared_address(memory);
  const u32 ring = x_ring + DEPTH * X_BYTES + warp * DEPTH * W_BYTES;
  const int num_tiles = min(max(p.num_tiles - tile, 0), TILES);  // of this warp
  Source source(p, num_tiles ? tile : 0, first, lane);
  auto fetch_w = [&](int slot) {
    EACH(r, TILES) if (r < num_tiles) {
        Source one = source; one.skip(r * source.tile_bytes);
        one.fetch(ring + slot * W_BYTES + r * STEP_BYTES);
      }
    source.skip(STEP * 2);
  };
  // The first 128 threads copy x, eight rows at a time; beyond the last row the first again.
  const int x_row = threadIdx.x >> 4;
  const u32 x_to = x_ring + x_row * X_ROW + (threadIdx.x & 15) * 16;
  int x_at = (threadIdx.x & 15) * 8 + first * STEP;
  auto fetch_x = [&](int slot) {
    if (threadIdx.x < 128) {
      EACH(m, EIGHTS) {
        const int row = m * 8 + x_row < p.num_rows ? m * 8 + x_row : 0;
        copy16(x_to + slot * X_BYTES + m * 8 * X_ROW, p.x + row * (p.num_steps * STEP) + x_at);
      }
      x_at += STEP;
    }
  };
  release_dependents();
  EACH(i, DEPTH - 1) if (i < num_steps) fetch_w(i);
  wait_for_inputs();
  EACH(i, DEPTH - 1) { if (i < num_steps) fetch_x(i); commit(); }
  float sums[TILES][EIGHTS][4] = {};
  const u32 from = ring + weight_offset(lane), x_from = x_ring + x_offset(lane, X_ROW);
  int left = num_steps;
  while (left > 0) {
    EACH(slot, DEPTH) {
      wait_copies<DEPTH - 2>();
      __syncthreads();
      const int next = (slot + DEPTH - 1) % DEPTH;
      if (left >= DEPTH) { fetch_w(next); fetch_x(next); }
      commit();
      multiply_step<EIGHTS, TILES>(sums, from + slot * W_BYTES, x_from + slot * X_BYTES, 8 * X_ROW);
      if (--left == 0) break;
    }
  }
  if (num_slices == 1) {
    EACH(r, TILES) {
      if (tile + r >= p.num_tiles) continue;
      EACH(m, EIGHTS) {
        finish(p, m * 8 + 2 * t, tile + r, g, sums[r][m][0], sums[r][m][2]);
        finish(p, m * 8 + 2 * t + 1, tile + r, g, sums[r][m][1], sums[r][m][3]);
      }
    }
    return;
  }
  const int width = num_warps * TILES * 16 + 8;  // of a row's partial sums: 32-byte steps apart
  float *partial = (float *)memory;
  wait_copies<0>();
  __syncthreads();
  EACH(r, TILES) EACH(m, EIGHTS) EACH(i, 4)
        partial[(m * 8 + 2 * t + (i & 1)) * width + (warp * TILES + r) * 16 + g + (i >> 1) * 8] =
            sums[r][m][i];
  cluster_barrier();
  const int num_pairs = num_warps * TILES * 8;
  for (int i = threadIdx.x; i < EIGHTS * num_pairs; i += blockDim.x) {
    const int row = i / num_pairs * 8 + slice, pair = i % num_pairs;
    const int owner = blockIdx.x * num_warps * TILES + (pair >> 3);
    if (row >= p.num_rows || owner >= p.num_tiles) continue;
    const u32 at = shared_address(partial + row * width + (pair >> 3) * 16 + (pair & 7));
    float low = 0.0f, high = 0.0f;
    EACH(s, SLICES) low += read_of_rank(at, s), high += read_of_rank(at + 32, s);
    finish(p, row, owner, pair & 7, low, high);
  }
  cluster_barrier();  // nobody's memory goes while another reads it
}
#define ONE_ROW(DEPTH)                                                                          \
  extern "C" __global__ void __launch_bounds__(256, 3)                                          \
  one_row_##DEPTH(const Product p) { one_row<DEPTH>(p); }
#define SOME_ROWS(EIGHTS, TILES, DEPTH)                                                         \
  extern "C" __global__ void __launch_bounds__(256, 2)                                          \
  some_rows_##EIGHTS##_##TILES##_##DEPTH(const Product p) { some_rows<EIGHTS, TILES, DEPTH>(p); }
ONE_ROW(2)
ONE_ROW(3)
SOME_ROWS(1, 1, 2)
SOME_ROWS(1, 1, 3)
SOME_ROWS(1, 1, 4)
SOME_ROWS(2, 1, 2)
SOME_ROWS(4, 1, 2)
SOME_ROWS(4, 2, 3)
"""
"""Of up to 32 rows; ``HALF`` is 1 for float16, 0 for bfloat16."""
