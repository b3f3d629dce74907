// Decode attention over the paged cache, with rotation and cache write. Every row has one new
// token.
//
// A row's visible pages are cut into splits of equal length, and up to eight splits form a group. A
// block walks over consecutive splits for a row and a key/value head. The blocks of a group form a
// cluster and share its splits evenly. The first block of the cluster receives and combines the
// sums in order. The last group to arrive combines several groups in order. A cluster may walk over
// several groups, so short rows with a long table start no blocks for it. A row's bits depend on
// the split count in a group, not on the block count. With a split for each block, fewer
// sums are combined.
//
// Four warps of a block compute 16 positions each in every page. With 256 channels there are eight
// warps: pairs share positions, with half the channels each. They store their sums in two turns,
// with half the heads each, because the L1 cache for pages needs the remaining shared memory.

#include "attention_pages.cuh"
#ifndef GENERATED  // engines have bfloat16 pages and plain rows only
#include "arrange.cuh"
#include "attention_bfp8.cuh"
#endif

constexpr int PAGE = 64, WARPS = 4;  // WARPS: warps with different positions
constexpr int MOST_SPLITS = 8;  // in a group
template <int D> constexpr int THREADS = WARPS * 32 * PARTS<D>;
template <int D> constexpr int TURNS = PARTS<D>;  // turns in which warps store their sums

struct Attend {
  const Value *qkv;          // [B, (H + 2 G) D]
  u16 *out;                  // bf16 [B, out_stride], or the next matmul's x: see `put`
  const i64 *positions, *slots;
  const Page *tables;        // [S, table_width]
  const Turn *inv_freq;  // [half], or cosines [half] and sines for each position
  u8 *values, *exponents;    // [P, 2, G, PAGE, D], [P, 2, G, PAGE, D / 16]
  float *partial, *peaks, *totals;  // group results: [B, G, groups, R, D], [B, G, groups, R]
  u32 *arrived;  // [B, G], zeros between launches
  int table_width, out_stride, group_heads, num_kv_heads, half, window, interleaved, early;
  int num_groups, num_joined;  // num_joined: blocks in a cluster, a power of two
  int group_splits;  // maximum; a multiple of num_joined
  int short_pages;  // maximum pages for a single group
  int num_places, is_coded;  // num_places: of the next matmul's x, or 0 if `out` has plain rows
  float scale;  // multiplied by log2(e)
};

// The rotated new token.
template <int F, int D, int NH> struct Token {
  float cos[D], sin[D];
  u8 q[NH * 8 * Shape<F, D>::Q_ROW];
  float q_units[PARTS<D>][NH * 8];  // bfp8: scales that undo the scaling of float16 q
  u8 fresh[2][D * 2];  // its key and value in a page row's layout
  u32 fresh_exponents[2][2 * PARTS<D>];
};
template <int F, int D, int NH> struct Shared : Token<F, D, NH> {
  float2 warp_stats[PARTS<D>][WARPS][NH * 8];  // peak and total, equal for all parts
  float2 stats[MOST_SPLITS][NH * 8];
  unsigned long long received;       // mbarrier
  int is_last;
};
// The buffers after it: with several parts, scores [2 by page, WARPS, PARTS, NH, 32] float4; then
// warp_sums [WARPS, R of a turn, D] and sums [splits of a group, R, D] fp32.

// Compute cosines and sines for the channels.
template <int F, int D, int NH>
__device__ __forceinline__ void turn(const Attend &p, Token<F, D, NH> &s, int position) {
  if ((int)threadIdx.x < D) {
    const int c = threadIdx.x;
    const bool second = p.interleaved ? c & 1 : c >= p.half;
    float2 turn = make_float2(1.0f, 0.0f);
    if (c < 2 * p.half) {
      const int i = p.interleaved ? c >> 1 : second ? c - p.half : c;
#ifdef GENERATED
      const Turn *turns = p.inv_freq + (i64)position * (2 * p.half);
      turn = make_float2(value_of(turns[i]), value_of(turns[p.half + i]));
#else
      turn = cos_sin((float)position * p.inv_freq[i]);
#endif
    }
    s.cos[c] = turn.x;
    s.sin[c] = second ? turn.y : -turn.y;
  }
}
// Rotate the new token: store q in `s.q` and, if the block `stores`, key and value. `TEAMS`: warps
// in a block, or pairs of warps with half the channels each. `meanwhile` runs during the loads.
template <int F, int D, int NH, int TEAMS, class Meanwhile>
__device__ __forceinline__ void enter(const Attend &p, Token<F, D, NH> &s, const Value *token,
                                      int num_heads, int g, bool stores, i64 row,
                                      Meanwhile meanwhile) {
  using S = Shape<F, D>;
  constexpr int ROUNDS = (NH * 8 + 2 + TEAMS - 1) / TEAMS, C = CHANNELS<D>;
  const int lane = threadIdx.x & 31, part = (threadIdx.x >> 5) % PARTS<D>;
  const int warp = (threadIdx.x >> 5) / PARTS<D>, c = part * C + (lane < C / 4 ? lane * 4 : 0);
  const int num_rows = num_heads + (stores ? 2 : 0);
  int partner = c;  // for pairs in halves
  if (!p.interleaved && c < 2 * p.half) partner = c < p.half ? c + p.half : c - p.half;
  float4 own[ROUNDS], other[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int r = i * TEAMS + warp, beyond = r - num_heads;
    if (r >= num_rows) continue;
    const int head = beyond < 0 ? g * num_heads + r : (num_heads + beyond) * p.num_kv_heads + g;
    own[i] = read_floats(token + head * D + c);
    other[i] = read_floats(token + head * D + partner);
  }
  meanwhile();
  __syncthreads();  // cos and sin are complete
  const float4 cos = *(const float4 *)(s.cos + c), sin = *(const float4 *)(s.sin + c);
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    const int r = i * TEAMS + warp, of = r - num_heads;
    if (r >= num_rows) continue;
    float4 x = own[i];
    if (of < 1) {
      const float4 o = p.interleaved ? make_float4(x.y, x.x, x.w, x.z) : other[i];
      x = make_float4(x.x * cos.x + o.x * sin.x, x.y * cos.y + o.y * sin.y,
                      x.z * cos.z + o.z * sin.z, x.w * cos.w + o.w * sin.w);
    }
    if (of < 0) {
      if constexpr (F == BFP8) {
        const float unit = Form<F>::scale_query(x);
        if (lane == 0) s.q_units[part][r] = unit;
      }
      if (lane < C / 4)
        *(uint2 *)(s.q + r * S::Q_ROW + c * 2) =
            make_uint2(Form<F>::pack(x.x, x.y), Form<F>::pack(x.z, x.w));
    } else {
      const i64 at = row + of * (i64)p.num_kv_heads * PAGE;
      const int first = part * C * S::BYTES, block = part * (C / 16);
      store_fresh<F, C>(x, lane, s.fresh[of] + first, (u8 *)s.fresh_exponents[of] + block,
                        p.values + at * S::ROW + first, p.exponents + at * S::BLOCKS + block);
    }
  }
  __syncthreads();
}

// A row's visible pages, [seen, end), in splits of `each` pages.
struct Cut {
  int newest, seen, end, each, used;  // newest: the new token's page; used: the row's splits
};
__device__ __forceinline__ Cut cut_of(const Attend &p, int position) {
  Cut cut;
  cut.seen = p.window > 0 ? max(position - p.window + 1, 0) / PAGE : 0;
  cut.newest = position / PAGE;
  cut.end = cut.newest + 1;
  const int num_pages = cut.end - cut.seen;
  const int num_splits = p.group_splits * (num_pages <= p.short_pages ? 1 : p.num_groups);
  cut.each = num_splits == 1 ? num_pages : 1;  // avoids a division
  cut.used = num_splits == 1 ? 1 : num_pages;
  if (num_splits > 1 && num_pages > num_splits) {
    cut.each = (num_pages + num_splits - 1) / num_splits;
    cut.used = (num_pages + cut.each - 1) / cut.each;
  }
  if (position < 0) cut.used = 0;
  return cut;
}
// The pages [first, stop) of a block.
struct Plan : Cut {
  int first, stop;
  int split, last_split;  // splits of this block
  int group, in_group;  // in_group: end of the group in splits
};
__device__ __forceinline__ Plan plan_of(const Attend &p, int position, int group) {
  Plan plan;
  (Cut &)plan = cut_of(p, position);
  plan.group = group;
  const int first_split = group * p.group_splits;
  plan.in_group = min(plan.used, first_split + p.group_splits);
  const int left = max(plan.in_group - first_split, 0);
  const int own = (left + p.num_joined - 1) >> (__ffs(p.num_joined) - 1);
  plan.split = first_split + blockIdx.x * own;
  plan.last_split = min(plan.split + own, plan.in_group);
  plan.first = plan.seen + plan.split * plan.each;
  plan.stop = min(plan.seen + plan.last_split * plan.each, plan.end);
  return plan;
}

// Write four channels of the block's row.
__device__ __forceinline__ void put(const Attend &p, int channel, uint2 four) {
#ifndef GENERATED
  if (p.num_places) {
    arrange_four(p.out, p.num_places, blockIdx.y, channel, p.is_coded, four);
    return;
  }
#endif
  *(uint2 *)(p.out + (i64)blockIdx.y * p.out_stride + channel) = four;
}
__device__ __forceinline__ void finish(const Attend &p, int channel, float4 acc, float total) {
  const float scale = 1.0f / total;
  put(p, channel, make_uint2(pack2(acc.x * scale, acc.y * scale),
                             pack2(acc.z * scale, acc.w * scale)));
}

// Add the sums of up to COUNT splits or warps in order. `stats` returns peak and total, and `sums`
// returns the sum. `all`: the largest peak and the total weight.
template <int COUNT, class Stats, class Sums>
__device__ __forceinline__ float4 add_up(float2 &all, int count, Stats stats, Sums sums) {
  float2 own[COUNT];
  float4 parts[COUNT], acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  all = make_float2(nothing(), 0.0f);
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {  // load all at once; indices after the last repeat it
    const int there = min(j, count - 1);
    own[j] = stats(there);
    parts[j] = sums(there);
    all.x = fmaxf(all.x, own[j].x);
  }
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    const float weight = j < count ? power_of_2(own[j].x - all.x) : 0.0f;
    all.y += weight * own[j].y;
    add(acc, weight, parts[j]);
  }
  return acc;
}
// Combine a group's splits in order, into the output from `channel` or, with several groups, into
// scratch. Return whether this block combines the groups.
template <int F, int D, int NH>
__device__ __forceinline__ bool combine_splits(const Attend &p, Shared<F, D, NH> &s,
                                               const float *sums, const Plan &plan, int num_heads,
                                               int channel, i64 place) {
  const int num_splits = plan.in_group - plan.group * p.group_splits;
  const bool is_whole = plan.used <= p.group_splits;
  for (int i = threadIdx.x; i < num_heads * (D / 4); i += THREADS<D>) {
    const int head = i / (D / 4);
    float4 acc = *(const float4 *)(sums + i * 4);
    float2 all = s.stats[0][head];
    if (num_splits > 1)
      acc = add_up<MOST_SPLITS>(
          all, num_splits, [&](int j) { return s.stats[j][head]; },
          [&](int j) { return *(const float4 *)(sums + (j * num_heads * (D / 4) + i) * 4); });
    if (is_whole) {
      finish(p, channel + i * 4, acc, all.y);
      continue;
    }
    const i64 at = (place * p.num_groups + plan.group) * num_heads;
    *(float4 *)(p.partial + at * D + i * 4) = acc;
    if (i % (D / 4) == 0) p.peaks[at + head] = all.x, p.totals[at + head] = all.y;
  }
  if (is_whole) return false;
  __syncthreads();
  if (threadIdx.x == 0) {
    const u32 num_groups = (plan.used + p.group_splits - 1) / p.group_splits;
    s.is_last = count_arrival(p.arrived + place) == num_groups - 1;
    if (s.is_last) p.arrived[place] = 0;
  }
  __syncthreads();
  return s.is_last;
}
template <int D, int NUM_THREADS>
__device__ __forceinline__ void combine_groups(const Attend &p, int used, int num_heads,
                                               int channel, i64 place) {
  const int num_groups = (used + p.group_splits - 1) / p.group_splits;
  for (int i = threadIdx.x; i < num_heads * (D / 4); i += NUM_THREADS) {
    const i64 first = place * p.num_groups * num_heads;
    const float *peaks = p.peaks + first + i / (D / 4), *totals = p.totals + first + i / (D / 4);
    const float *partial = p.partial + first * D + i * 4;
    float peak = nothing(), total = 0.0f;
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int j = 0; j < num_groups; ++j) peak = fmaxf(peak, read_float(peaks + j * num_heads));
    for (int j = 0; j < num_groups; ++j) {
      const float weight = power_of_2(read_float(peaks + j * num_heads) - peak);
      total += weight * read_float(totals + j * num_heads);
      add(acc, weight, read_floats(partial + (i64)j * num_heads * D));
    }
    finish(p, channel + i * 4, acc, total);
  }
}

template <int D> __device__ __forceinline__ int heads_of_a_turn(int num_heads) {  // maximum
  return (num_heads + TURNS<D> - 1) / TURNS<D>;
}
// Combine a split's sums of four warps in order, and store them at index `j` in the cluster's first
// block. The heads are `turn`, turn + TURNS, ...
template <int F, int D, int NH>
__device__ __forceinline__ void combine_warps(Shared<F, D, NH> &s, const float *warp_sums,
                                              float *sums, int j, int num_heads, bool is_first,
                                              int turn) {
  const int most = heads_of_a_turn<D>(num_heads);
  const int count = (num_heads - turn + TURNS<D> - 1) / TURNS<D>;
  for (int i = threadIdx.x; i < count * (D / 4); i += THREADS<D>) {
    const int head = i / (D / 4) * TURNS<D> + turn;
    const int place = TURNS<D> == 1 ? i : head * (D / 4) + i % (D / 4);
    float2 all;
    const float4 acc = add_up<WARPS>(
        all, WARPS, [&](int w) { return s.warp_stats[0][w][head]; },
        [&](int w) { return *(const float4 *)(warp_sums + (w * most * (D / 4) + i) * 4); });
    float4 *to = (float4 *)(sums + (j * num_heads * (D / 4) + place) * 4);
    if (is_first) *to = acc;
    else send(to, acc, &s.received);
    if (i % (D / 4)) continue;
    if (is_first) s.stats[j][head] = all;
    else send(&s.stats[j][head], all, &s.received);
  }
}

// Compute this block's part of a `group`. ALONE: the block has no further group. Return whether the
// row has splits in later groups.
template <int F, int D, int NH, bool ALONE>
__device__ __forceinline__ bool attend(const Attend &p, int group) {
  using S = Shape<F, D>;
  extern __shared__ __align__(128) u8 memory[];
  Shared<F, D, NH> &s = *(Shared<F, D, NH> *)memory;
  const int num_heads = p.group_heads;
  float4 *traded = (float4 *)(memory + (sizeof(Shared<F, D, NH>) + 15) / 16 * 16);
  float *warp_sums = (float *)(traded + (PARTS<D> == 1 ? 0 : 2 * WARPS * PARTS<D> * NH * 32));
  const int most = heads_of_a_turn<D>(num_heads);
  float *sums = warp_sums + WARPS * most * D;
  const int warp = (threadIdx.x >> 5) / PARTS<D>;
  const int part = PARTS<D> == 1 ? 0 : (threadIdx.x >> 5) % PARTS<D>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first_channel = part * CHANNELS<D>;
  // Groups are the slowest index: working blocks do not wait for idle blocks of short contexts.
  const int b = blockIdx.y, kv_head = blockIdx.z % p.num_kv_heads;
  if (ALONE) group = blockIdx.z / p.num_kv_heads;
  const bool is_joined = p.num_joined > 1, is_first = blockIdx.x == 0;
  if (ALONE) release_dependents();
  if (ALONE && !p.early) wait_for_inputs();
  const i64 slot = read_long(p.slots + b);
  const int position = (int)read_long(p.positions + b);
  if (is_joined) {
    if (is_first && threadIdx.x == 0) open_barrier(&s.received);
    __syncwarp();
    cluster_arrive();
  }
  const Plan plan = plan_of(p, position, group);
  const int first_out = kv_head * num_heads * D;
  if (plan.split >= plan.in_group) {
    if (is_joined) cluster_wait();
    if (position >= 0 || group > 0 || !is_first) return false;
    if (p.early) wait_for_inputs();
    for (int i = threadIdx.x; i < num_heads * (D / 4); i += THREADS<D>)
      put(p, first_out + i * 4, make_uint2(0, 0));
    return false;
  }
  // Earlier kernels wrote everything read before the wait: the pages of earlier positions.
  const u8 *table = (const u8 *)(p.tables + slot * p.table_width);
  const u32 page_rows = 2 * p.num_kv_heads * PAGE, to_values = p.num_kv_heads * PAGE;
  const int key_row = kv_head * PAGE + warp * 16 + g, value_row = to_values + key_row - g + 2 * t;
  Page number, next_number = 0, newest_number = 0;
  read<PAGE_BYTES / 4>((u32 *)&number, table + (i64)plan.first * PAGE_BYTES, true);
  read<PAGE_BYTES / 4>((u32 *)&next_number, table + (i64)(plan.first + 1) * PAGE_BYTES,
                      plan.first + 1 < plan.stop);
  const bool stores = plan.last_split == plan.used;
  read<PAGE_BYTES / 4>((u32 *)&newest_number, table + (i64)plan.newest * PAGE_BYTES, stores);
  // A lane's visible rows are below `position` and inside the window.
  const int oldest = p.window > 0 ? position - p.window : -1;
  Keys<F, D> keys{};
  Values<F, D> values{};
  auto ask_keys = [&](int page) {
    const int at = page * PAGE + warp * 16 + g;
    const i64 row = FIRST_ROW(number) + key_row;
    read_keys<F, D>(keys, p.values + row * S::ROW + (first_channel + t * 8) * S::BYTES,
                    p.exponents + row * S::BLOCKS + first_channel / 16,
                    at < position && at > oldest, at + 8 < position && at + 8 > oldest);
  };
  auto ask_values = [&](int page) {
    const int at = page * PAGE + warp * 16 + 2 * t;
    const i64 row = FIRST_ROW(number) + value_row;
    u32 wanted = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int here = at + (i & 1) + (i >> 1) * 8;
      wanted |= (u32)(here < position && here > oldest) << i;
    }
    const int channel = first_channel + g * S::V_WIDTH;
    read_values<F, D>(values, p.values + row * S::ROW + channel * S::BYTES,
                      p.exponents + row * S::BLOCKS + first_channel / 16, wanted);
  };
  ask_keys(plan.first);
  ask_values(plan.first);
  // Bytes without a block exponent, which are read with the exponents.
  if (D % 128 && threadIdx.x < 4) s.fresh_exponents[threadIdx.x >> 1][threadIdx.x & 1] = 0;
  turn<F, D, NH>(p, s, position);
  const u8 *fresh_key = s.fresh[0] + first_channel * S::BYTES;
  const u8 *fresh_value = s.fresh[1] + first_channel * S::BYTES;
  const int beyond = plan.in_group - plan.last_split;  // splits that peers in the cluster send
  if (is_first && beyond > 0 && threadIdx.x == 0)
    expect_bytes(&s.received, beyond * num_heads * (D * 4 + 8));
  if (p.early) wait_for_inputs();
  const int width = (num_heads + 2) * p.num_kv_heads * D;
  enter<F, D, NH, WARPS>(p, s, p.qkv + (i64)b * width, num_heads, kv_head, stores,
                  FIRST_ROW(newest_number) + kv_head * PAGE + position % PAGE, [] {});
  if (is_joined) cluster_wait();  // the first block can receive
  int page = plan.first;
  for (int split = plan.split; split < plan.last_split; ++split) {
    Running<D, NH> run;
    run.clear();
    const int split_stop = min(page + plan.each, plan.stop);
    do {
      const int at = page * PAGE + warp * 16;
      const bool is_fresh = at <= position && position < at + 16;
      const int fresh = position - at;
      if (is_fresh) {
        const u32 *exponents = s.fresh_exponents[0] + 2 * part;
        if (g == fresh) take_key<F, D>(keys, 0, fresh_key, exponents, t);
        if (g + 8 == fresh) take_key<F, D>(keys, 1, fresh_key, exponents, t);
      }
      float scores[NH][4], peaks[NH][2], fade[NH][2];
      u32 weights[NH][2];
      score<F, D, NH>(scores, keys, s.q + first_channel * 2, s.q_units[part], num_heads, g, t);
      const int next = page + 1;
      float4 *pair_scores = traded + ((page & 1) * WARPS + warp) * PARTS<D> * NH * 32;
      if (PARTS<D> > 1) leave_scores<NH>(scores, pair_scores + part * NH * 32, lane);
      if (next < plan.stop) {
        number = next_number;
        read<PAGE_BYTES / 4>((u32 *)&next_number, table + (i64)(next + 1) * PAGE_BYTES,
                            next + 1 < plan.stop);
        ask_keys(next);
      }
      if (PARTS<D> > 1) take_scores<NH>(scores, pair_scores + (1 - part) * NH * 32, warp, lane);
      mask<NH>(scores, peaks, p.scale, at + g <= position && at + g > oldest,
               at + g + 8 <= position && at + g + 8 > oldest);
      weigh<F, D, NH>(weights, fade, run, scores, peaks);
      if (is_fresh) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (2 * t + (i & 1) + (i >> 1) * 8 == fresh)
            take_value<F, D>(values, i, fresh_value, s.fresh_exponents[1] + 2 * part, g);
      }
      add_values<F, D, NH>(run, values, weights, fade, g);
      if (next < plan.stop) ask_values(next);
      page = next;
    } while (page < split_stop);
#pragma unroll
    for (int turn = 0; turn < TURNS<D>; ++turn) {
      leave<F, D, NH, TURNS<D>>(run, s.warp_stats[part][warp],
                                warp_sums + warp * most * D + first_channel, num_heads, g, t, turn);
      __syncthreads();
      combine_warps<F, D, NH>(s, warp_sums, sums, split - plan.group * p.group_splits, num_heads,
                              is_first, turn);
      __syncthreads();
    }
  }
  const bool more = plan.in_group < plan.used;
  if (!is_first) return more;
  if (beyond > 0) wait_bytes(&s.received);
  const i64 place = (i64)b * p.num_kv_heads + kv_head;
  if (combine_splits<F, D, NH>(p, s, sums, plan, num_heads, first_out, place))
    combine_groups<D, THREADS<D>>(p, plan.used, num_heads, first_out, place);
  return more;
}

// Compute a cluster's remaining groups. This function is separate to leave registers to the
// first group. A group with successors has all splits, a multiple of the cluster's blocks, so every
// block has work and none ends early.
template <int F, int D, int NH> __device__ __noinline__ void walk_on(const Attend &p) {
  extern __shared__ __align__(128) u8 memory[];
  Shared<F, D, NH> &s = *(Shared<F, D, NH> *)memory;
  const int num_begun = gridDim.z / p.num_kv_heads;
  for (int group = blockIdx.z / p.num_kv_heads + num_begun; group < p.num_groups;
       group += num_begun) {
    __syncthreads();  // all reads of the previous group are complete
    if (p.num_joined > 1 && blockIdx.x == 0 && threadIdx.x == 0) close_barrier(&s.received);
    if (!attend<F, D, NH, false>(p, group)) return;
  }
}
template <int F, int D, int NH> __device__ __forceinline__ void walk(const Attend &p) {
  release_dependents();
  if (!p.early) wait_for_inputs();
  const int num_begun = gridDim.z / p.num_kv_heads, group = blockIdx.z / p.num_kv_heads;
  if (attend<F, D, NH, false>(p, group) && group + num_begun < p.num_groups) walk_on<F, D, NH>(p);
}

// A walking kernel makes calls and needs a stack, which slows single rows. Therefore there are two
// kernels.
#define KERNEL(kind, F, D, NH, parameter, body)                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS<D>, (NH == 1 ? 4 : 2) / PARTS<D>)           \
  kind##_##D##_##NH(parameter Attend p) { body; }
#define KERNELS(name, F, D, NH)                                                                    \
  KERNEL(attend_##name, F, D, NH, const, (attend<F, D, NH, true>(p, 0)))                           \
  KERNEL(walk_##name, F, D, NH, const __grid_constant__, (walk<F, D, NH>(p)))
#define ATTEND(D, NH) KERNELS(bf16, BF16, D, NH) KERNELS(bfp8, BFP8, D, NH)
#define ALL(D) ATTEND(D, 1) ATTEND(D, 2)

ALL(64)
ALL(96)
ALL(128)
ALL(256)

#ifndef GENERATED
#include "attention_small_m.cuh"
#endif
