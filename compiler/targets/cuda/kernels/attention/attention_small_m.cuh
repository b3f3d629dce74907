// Decode attention for few rows: sixteen blocks compute up to 32 pages of a row and key/value head
// at once. The bits equal those of attention.cu, whose blocks walk from page to page.
//
// A block has eight teams. A team is a warp or, with 256 channels, a pair of warps with half the
// channels each.
//
// Short rows have a single group. Two blocks share a split with up to four pages. A team computes
// the keys for 16 positions in a page and passes the weights to the four teams with these
// positions. A team then adds a quarter of the channels for the values of all pages. Sums fade from
// page to page as if one warp had walked there.
//
// Long rows have splits with a page each. A team computes keys and values for 16 positions, and a
// cluster computes four groups. Sums go directly to the block that combines their channels.
// attention.cu includes this file after the common code.
#pragma once

#include "attention_tiles.cuh"

constexpr int JOINED = 16, TEAMS = 8;  // blocks in a cluster and teams in a block
constexpr int CLUSTER_SPLITS = 32;  // for long rows
template <int D> constexpr int SPREAD_THREADS = TEAMS * PARTS<D> * 32;
template <int D> constexpr int OWN = D / JOINED;  // channels that a block combines
// float4 values of eight heads in these channels
template <int D> constexpr int ITEMS = 8 * OWN<D> / 4;

template <int F, int D> struct SpreadShared : Token<F, D, 1> {
  float4 traded[PARTS<D> == 1 ? 1 : TEAMS][PARTS<D>][32];  // scores for half the channels
  float2 peaks[TEAMS][4];  // peaks of a team's page, two heads in an element
  float4 weights[TEAMS][32];  // b fragments, and a lane's totals for two heads
  float4 fades[TEAMS][4];  // factors for the sums so far, and peaks so far, for two heads
  float2 stats[CLUSTER_SPLITS][8];
  unsigned long long received;  // mbarrier
  int is_last;
};
// The buffers after it, by split and warp: float4 [4], peak and total of eight heads. Then float4
// [ITEMS], sums of the block's channels.

template <int F, int D> struct Spread {
  using S = Shape<F, D>;
  const Attend &p;
  SpreadShared<F, D> &s;
  const i64 slot;
  const int position, oldest, kv_head, team, part, lane, g, t, first_channel;
  const u32 page_rows;
  const Cut cut;
  float4 *const stats, *const sums;

  __device__ __forceinline__ Spread(const Attend &p, SpreadShared<F, D> &s, i64 slot, int position)
      : p(p), s(s), slot(slot), position(position),
        oldest(p.window > 0 ? position - p.window : -1), kv_head(blockIdx.z % p.num_kv_heads),
        team((threadIdx.x >> 5) / PARTS<D>),
        part(PARTS<D> == 1 ? 0 : (threadIdx.x >> 5) % PARTS<D>), lane(threadIdx.x & 31),
        g(lane >> 2), t(lane & 3), first_channel(part * CHANNELS<D>),
        page_rows(2 * p.num_kv_heads * PAGE), cut(cut_of(p, position)),
        stats((float4 *)(&s + 1)),
        sums(stats + 4 * WARPS * (p.num_groups == 1 ? MOST_SPLITS : CLUSTER_SPLITS)) {}

  __device__ __forceinline__ Page number_of(int page, bool wanted) const {
    Page number;
    read<PAGE_BYTES / 4>((u32 *)&number, (const u8 *)(p.tables + slot * p.table_width + page),
                        wanted);
    return number;
  }
  __device__ __forceinline__ bool is_seen(int at) const { return at < position && at > oldest; }
  // Return the mask of visible rows among a lane's four value rows, 2 t + {0, 1, 8, 9}.
  __device__ __forceinline__ u32 seen_values(int page, int warp) const {
    const int at = page * PAGE + warp * 16 + 2 * t;
    u32 seen = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) seen |= (u32)is_seen(at + (i & 1) + (i >> 1) * 8) << i;
    return seen;
  }
  // Return the new token's page if the warp has its positions, else -1.
  __device__ __forceinline__ int fresh_page(int warp) const {
    return position / 16 % WARPS == warp ? cut.newest : -1;
  }
  __device__ __forceinline__ i64 values_row(Page number, int warp) const {
    return FIRST_ROW(number) + (p.num_kv_heads + kv_head) * PAGE + warp * 16 + 2 * t;
  }
  __device__ __forceinline__ void ask_keys(Keys<F, D> &keys, Page number, int page,
                                           int warp) const {
    const int at = page * PAGE + warp * 16 + g;
    const i64 from = FIRST_ROW(number) + kv_head * PAGE + warp * 16 + g;
    read_keys<F, D>(keys, p.values + from * S::ROW + (first_channel + t * 8) * S::BYTES,
                    p.exponents + from * S::BLOCKS + first_channel / 16, is_seen(at),
                    is_seen(at + 8));
  }
  __device__ __forceinline__ void ask_slice(Values<F, SLICE> &v, u32 &exponents, Page number,
                                            int page, int warp, int slice) const {
    const u32 seen = seen_values(page, warp);
    const i64 from = values_row(number, warp);
    const int channel = first_channel + slice * SLICE + g * Shape<F, SLICE>::V_WIDTH;
    read_values<F, D, SLICE>(v, p.values + from * S::ROW + channel * S::BYTES, nullptr, seen);
  }
  // Wait for the new token and rotate it. A block that `stores` the token knows its page.
  template <class Meanwhile>
  __device__ __forceinline__ void take_token(bool stores, Page newest, Meanwhile meanwhile) {
    turn<F, D, 1>(p, s, position);
    if (p.early) wait_for_inputs();
    const int width = (p.group_heads + 2) * p.num_kv_heads * D;
    enter<F, D, 1, TEAMS>(p, s, p.qkv + (i64)blockIdx.y * width, p.group_heads, kv_head, stores,
                          FIRST_ROW(newest) + kv_head * PAGE + position % PAGE, meanwhile);
  }
  __device__ __forceinline__ void take_fresh_key(Keys<F, D> &keys) const {
    const int fresh = position % 16;
    const u8 *key = s.fresh[0] + first_channel * S::BYTES;
    const u32 *exponents = s.fresh_exponents[0] + 2 * part;
    if (g == fresh) take_key<F, D>(keys, 0, key, exponents, t);
    if (g + 8 == fresh) take_key<F, D>(keys, 1, key, exponents, t);
  }
  // Read C channels from `channel`: a slice, or all channels of a team.
  template <int C>
  __device__ __forceinline__ void take_fresh_value(Values<F, C> &values, int channel) const {
    const int fresh = position % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (2 * t + (i & 1) + (i >> 1) * 8 == fresh)
        take_value<F, C>(values, i, s.fresh[1] + channel * S::BYTES,
                         s.fresh_exponents[1] + 2 * part, g);
  }
  __device__ __forceinline__ void score_page(float (&scores)[1][4], float (&peaks)[1][2],
                                             const KeyTiles<F, D> &keys, int page, int warp) {
    const int at = page * PAGE + warp * 16 + g;
    score<F, D, 1>(
        scores,
        [&](u32 (&out)[4], int row, int i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) out[j] = keys.words[row][4 * i + j];
        },
        keys.largest, s.q + first_channel * 2, s.q_units[part], p.group_heads, g, t);
    if constexpr (PARTS<D> > 1) {
      leave_scores<1>(scores, s.traded[team][part], lane);
      take_scores<1>(scores, s.traded[team][1 - part], team, lane);
    }
    mask<1>(scores, peaks, p.scale, at <= position && at > oldest,
            at + 8 <= position && at + 8 > oldest);
  }
  // Store a page's weights for the teams with its values. The peaks of `before` preceding pages are
  // complete.
  __device__ __forceinline__ void leave_weights(const float (&scores)[1][4],
                                                const float (&peaks)[1][2], int before) {
    Running<SLICE, 1> run;
    run.clear();
#pragma unroll
    for (int i = 0; i < MOST_PAGES - 1; ++i)
      if (i < before) {
        const float2 peak = s.peaks[2 * i + (team & 1)][t];
        run.peak[0][0] = fmaxf(run.peak[0][0], peak.x);
        run.peak[0][1] = fmaxf(run.peak[0][1], peak.y);
      }
    float fade[1][2];
    u32 weights[1][2];
    weigh<F, SLICE, 1>(weights, fade, run, scores, peaks);
    if (part > 0) return;
    s.weights[team][lane] = make_float4(__uint_as_float(weights[0][0]),
                                        __uint_as_float(weights[0][1]), run.total[0][0],
                                        run.total[0][1]);
    if (g == 0)
      s.fades[team][t] = make_float4(fade[0][0], fade[0][1], run.peak[0][0], run.peak[0][1]);
  }
  // Add a page to a slice's sums. `of`: the team that stored the weights.
  __device__ __forceinline__ void add_page(Running<SLICE, 1> &run, const ValueTiles<F> &tiles,
                                           int largest, int of) const {
    const float4 left = s.weights[of][lane], fades = s.fades[of][t];
    const u32 weights[1][2] = {{__float_as_uint(left.x), __float_as_uint(left.y)}};
    float fade[1][2] = {{fades.x, fades.y}};
    run.peak[0][0] = fades.z, run.peak[0][1] = fades.w;
    run.total[0][0] = run.total[0][0] * fades.x + left.z;
    run.total[0][1] = run.total[0][1] * fades.y + left.w;
    add_tiles<F, SLICE, 1>(
        run,
        [&](u32 (&a)[4], int j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = tiles.words[4 * j + i];
        },
        largest, weights, fade);
  }
  // Send a team's sums from `channel` to the blocks that combine them and, if it `tells`, peaks and
  // totals to all blocks. `unit`: warp index over all splits. R: channels, or channels of heads.
  template <int R>
  __device__ __forceinline__ void send_sums(const Running<R, 1> &run, int unit, int channel,
                                            bool tells) const {
    constexpr int WIDTH = Shape<F, R>::V_WIDTH, HALF = CHANNELS<R> / 16;
    if (tells) {
      float total[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        total[i] = run.total[0][i];
#pragma unroll
        for (int offset = 4; offset <= 16; offset <<= 1)
          total[i] += __shfl_xor_sync(~0u, total[i], offset);
      }
      const float4 summary = make_float4(run.peak[0][0], total[0], run.peak[0][1], total[1]);
      send(stats + unit * 4 + t, summary, &s.received, g);
      send(stats + unit * 4 + t, summary, &s.received, g + 8);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * t + i;
      if (head >= p.group_heads) continue;
#pragma unroll
      for (int first = 0; first < 2 * HALF; first += 4) {
        float c[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          c[j] = first + j < HALF ? run.sums[0][(first + j) % HALF][i]
                                  : run.sums[0][(first + j) % HALF][2 + i];
        }
        const int to = channel + (first / WIDTH * 8 + g) * WIDTH + first % WIDTH;
        send(sums + unit * ITEMS<D> + head * (OWN<D> / 4) + to % OWN<D> / 4,
             make_float4(c[0], c[1], c[2], c[3]), &s.received, to / OWN<D>);
      }
    }
  }
  __device__ __forceinline__ int first_out() const { return kv_head * p.group_heads * D; }
  // Expect the sums of `num_splits` splits from the cluster.
  __device__ __forceinline__ void expect(int num_splits) const {
    if (threadIdx.x == 0)
      expect_bytes(&s.received, num_splits * WARPS * (64 + p.group_heads * OWN<D> * 4));
  }
  // Combine this block's channels over splits, for groups from `group`. Write `out` or, with
  // several groups, scratch.
  __device__ __forceinline__ void combine(int num_splits, int group, bool is_whole) const {
    constexpr int N = OWN<D> / 4;
    wait_bytes(&s.received);
    for (int x = threadIdx.x; x < num_splits * ITEMS<D>; x += SPREAD_THREADS<D>) {
      const int split = x / ITEMS<D>, i = x % ITEMS<D>, head = i / N;
      if (head >= p.group_heads) continue;
      const float2 *of_warps = (const float2 *)(stats + split * WARPS * 4) + head;
      float4 *parts = sums + split * WARPS * ITEMS<D> + i;
      float2 all;
      *parts = add_up<WARPS>(
          all, WARPS, [&](int w) { return of_warps[w * 8]; },
          [&](int w) { return parts[w * ITEMS<D>]; });
      if (i % N == 0) s.stats[split][head] = all;
    }
    __syncthreads();
    const int num_groups = (num_splits + MOST_SPLITS - 1) / MOST_SPLITS;
    for (int x = threadIdx.x; x < num_groups * ITEMS<D>; x += SPREAD_THREADS<D>) {
      const int first = x / ITEMS<D> * MOST_SPLITS, i = x % ITEMS<D>, head = i / N;
      if (head >= p.group_heads) continue;
      const int count = min(num_splits - first, MOST_SPLITS);
      const float4 *from = sums + first * WARPS * ITEMS<D> + i;
      float4 acc = *from;
      float2 all = s.stats[first][head];
      if (count > 1)
        acc = add_up<MOST_SPLITS>(
            all, count, [&](int j) { return s.stats[first + j][head]; },
            [&](int j) { return from[j * WARPS * ITEMS<D>]; });
      const int channel = blockIdx.x * OWN<D> + i % N * 4;
      if (is_whole) {
        finish(p, first_out() + head * D + channel, acc, all.y);
        continue;
      }
      const i64 place = (i64)blockIdx.y * p.num_kv_heads + kv_head;
      const i64 at = (place * p.num_groups + group + first / MOST_SPLITS) * p.group_heads + head;
      *(float4 *)(p.partial + at * D + channel) = acc;
      if (blockIdx.x == 0 && i % N == 0) p.peaks[at] = all.x, p.totals[at] = all.y;
    }
  }
  // Compute a row with a single group.
  __device__ __forceinline__ void attend_short() {
    const int split = blockIdx.x >> 1;
    const int slice = team >> 1, warp = (blockIdx.x & 1) * 2 + (team & 1);
    const int first = cut.seen + split * cut.each, stop = min(first + cut.each, cut.end);
    const bool works = split < cut.used;
    expect(cut.used);
    if (works) {
      const bool stores = split == cut.used - 1 && position / 32 % 2 == (blockIdx.x & 1);
      const int page = first + slice, channel = first_channel + slice * SLICE;
      const int fresh_page = this->fresh_page(warp);
      const Page own = number_of(page, page < stop), newest = number_of(cut.newest, stores);
      Page numbers[MOST_PAGES];
#pragma unroll
      for (int i = 0; i < MOST_PAGES; ++i) numbers[i] = number_of(first + i, first + i < stop);
      KeyTiles<F, D> keys;
      ValueTiles<F> values[MOST_PAGES];
      Keys<F, D> keys_read{};
      Values<F, SLICE> values_read[MOST_PAGES]{};
      u32 exponents[MOST_PAGES]{}, largest = 0;  // a byte for each page
      if (page < stop) ask_keys(keys_read, own, page, warp);
#pragma unroll
      for (int i = 0; i < MOST_PAGES; ++i)
        if (first + i < stop)
          ask_slice(values_read[i], exponents[i], numbers[i], first + i, warp, slice);
      take_token(stores, newest, [&] {
        if (page < stop && page != fresh_page)
          keys.widen(keys_read, t);
        else
          keys.keep(keys_read);
#pragma unroll
        for (int i = 0; i < MOST_PAGES; ++i)
          if (first + i < stop && first + i != fresh_page)
            largest |= (u32)values[i].widen(values_read[i], exponents[i],
                                            i == 0 ? 0 : largest >> (8 * i - 8), slice, g, t)
                       << 8 * i;
          else
            values[i].keep(values_read[i], exponents[i]);
      });
      float scores[1][4], peaks[1][2];
      if (page < stop) {
        if (page == fresh_page) {
          Keys<F, D> kept = keys.kept();
          take_fresh_key(kept);
          keys.widen(kept, t);
        }
        score_page(scores, peaks, keys, page, warp);
        if (part == 0 && g == 0) s.peaks[team][t] = make_float2(peaks[0][0], peaks[0][1]);
      }
      const int barrier = TEAMS + (team & 1), num_threads = MOST_PAGES * PARTS<D> * 32;
      if (first + 1 < stop) barrier_of(barrier, num_threads);
      if (page < stop) leave_weights(scores, peaks, slice);
      barrier_of(barrier, num_threads);
      Running<SLICE, 1> run;
      run.clear();
#pragma unroll
      for (int i = 0; i < MOST_PAGES; ++i)
        if (first + i < stop) {
          if (first + i == fresh_page) {
            Values<F, SLICE> kept = values[i].kept();
            u32 exponents = values[i].words[4];
            take_fresh_value(kept, channel);
            if (2 * t + (g >> 1 & 1) + (g >> 2) * 8 == position % 16)
              exponents = s.fresh_exponents[1][2 * part + (g & 1)];
            largest |= (u32)values[i].widen(kept, exponents, run.largest, slice, g, t) << 8 * i;
          }
          add_page(run, values[i], largest >> 8 * i & 0xFF, 2 * i + (team & 1));
        }
      cluster_wait();  // all blocks can receive
      send_sums(run, split * WARPS + warp, channel, slice == 0 && part == 0);
    } else {
      if (p.early) wait_for_inputs();
      cluster_wait();
    }
    combine(cut.used, 0, true);
  }

  // Compute a row with several groups and a page for each split.
  __device__ __forceinline__ void attend_long(int cluster) {
    const int first = cluster * CLUSTER_SPLITS, num_splits = min(cut.used - first, CLUSTER_SPLITS);
    const int rank = blockIdx.x, split = 2 * rank + (team >> 2), warp = team & 3;
    const int page = cut.seen + first + split;
    const bool works = split < num_splits, stores = (cut.used - 1 - first) >> 1 == rank;
    expect(num_splits);
    const Page number = number_of(page, works), newest = number_of(cut.newest, stores);
    Keys<F, D> keys{};
    Values<F, D> values{};
    if (works) {
      ask_keys(keys, number, page, warp);
      const i64 from = values_row(number, warp);
      const int channel = first_channel + g * S::V_WIDTH;
      read_values<F, D>(values, p.values + from * S::ROW + channel * S::BYTES,
                        p.exponents + from * S::BLOCKS + first_channel / 16,
                        seen_values(page, warp));
    }
    take_token(stores, newest, [] {});
    Running<D, 1> run;
    run.clear();
    if (works) {
      float scores[1][4], peaks[1][2], fade[1][2];
      u32 weights[1][2];
      if (page == fresh_page(warp)) take_fresh_key(keys), take_fresh_value(values, first_channel);
      KeyTiles<F, D> tiles;
      tiles.widen(keys, t);
      score_page(scores, peaks, tiles, page, warp);
      weigh<F, D, 1>(weights, fade, run, scores, peaks);
      add_values<F, D, 1>(run, values, weights, fade, g);
    }
    cluster_wait();  // all blocks can receive
    if (works) send_sums(run, split * WARPS + warp, first_channel, part == 0);
    combine(num_splits, first / MOST_SPLITS, false);
    const int num_clusters = (cut.used + CLUSTER_SPLITS - 1) / CLUSTER_SPLITS;
    const i64 place = (i64)blockIdx.y * p.num_kv_heads + kv_head;
    __syncthreads();
    if (threadIdx.x == 0) {
      s.is_last = count_arrival(p.arrived + place) == num_clusters * JOINED - 1;
      if (s.is_last) p.arrived[place] = 0;
    }
    __syncthreads();
    if (s.is_last)
      combine_groups<D, SPREAD_THREADS<D>>(p, cut.used, p.group_heads, first_out(), place);
  }
  __device__ __forceinline__ void attend_none() const {
    if (blockIdx.x > 0 || blockIdx.z >= p.num_kv_heads) return;
    if (p.early) wait_for_inputs();
    for (int i = threadIdx.x; i < p.group_heads * (D / 4); i += SPREAD_THREADS<D>)
      put(p, first_out() + i * 4, make_uint2(0, 0));
  }
};

template <int F, int D> __device__ __forceinline__ void attend_small_m(const Attend &p) {
  extern __shared__ __align__(128) u8 memory[];
  SpreadShared<F, D> &s = *(SpreadShared<F, D> *)memory;
  release_dependents();
  if (!p.early) wait_for_inputs();
  const i64 slot = read_long(p.slots + blockIdx.y);
  const int position = (int)read_long(p.positions + blockIdx.y);
  if (threadIdx.x == 0) open_barrier(&s.received);
  __syncwarp();
  cluster_arrive();
  Spread<F, D> spread(p, s, slot, position);
  const int cluster = blockIdx.z / p.num_kv_heads;
  if (cluster * CLUSTER_SPLITS >= spread.cut.used) {
    cluster_wait();
    if (position < 0) spread.attend_none();
    return;
  }
  if (spread.cut.used <= MOST_SPLITS)
    spread.attend_short();
  else
    spread.attend_long(cluster);
}

// A cluster starts when sixteen multiprocessors have capacity at once. This register limit leaves
// registers for a small concurrent kernel, next to 512 threads or twice 256.
#define SMALL_M(name, F, D)                                                                        \
  extern "C" __global__ void __maxnreg__(D == 128 ? 120 : 112)                                     \
  attend_small_m_##name##_##D(const Attend p) { attend_small_m<F, D>(p); }

SMALL_M(bf16, BF16, 128)
SMALL_M(bf16, BF16, 256)
