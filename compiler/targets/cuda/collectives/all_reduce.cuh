// Protocol of collectives between the GPUs in a host. A rank stores into its peers' memory and
// polls its own memory for data. There are no flags and no barriers, and the order of stores is
// irrelevant.
//
// Every rank has three slots, used in turn. A slot has a part for every sender. The word EMPTY
// means missing data, and senders never send it. Collective e uses slot e % 3 and fills slot e - 1
// with EMPTY. A peer writes there again at e + 2. To reach e + 2, the peer needs our part of e + 1,
// which we send after e ends. Therefore every rank sends data to every peer in every collective.
//
// The number of a collective is a base in device memory plus its index in the step. The kernel that
// advances the base must not release its dependents early: the next kernel may read the base before
// its own wait.
#pragma once

#include "primitives.cuh"

typedef unsigned long long u64;

constexpr u32 EMPTY = 0x80000000u;  // -0.0
constexpr int SLOTS = 3;
constexpr u32 WRAP = 3u << 28;  // a multiple of SLOTS
constexpr int POLLS_BETWEEN_LOOKS = 64;  // a power of two
// offsets in the group's state; WORDS has an entry for each slot
enum { BASE, WORDS, LIMIT = 4, STOPPED };
enum { FAILED, BY_RANK, FOR_PEER, AT_INDEX };  // offsets in the group's report

struct Group {
  unsigned long long peers[8];  // addresses of the ranks' slots in this process
  // BASE; WORDS: used words of 16 bytes, by slot; LIMIT: timeout in units of 1,024 ns; STOPPED:
  // ends all polling
  u32 *state;
                          // STOPPED ends all polling
  u32 *report;  // In host memory. Kernels must not poll it: thousands of threads would.
  u64 part_bytes;  // maximum message size in a slot
  int rank, count;
  int index, padding;  // index in the step
};

// Return the peer at distance `places` in the ring. Ranks start with different peers.
__device__ __forceinline__ int behind(const Group &group, int places) {
  const int rank = group.rank + places;
  return rank < group.count ? rank : rank - group.count;
}
__device__ __forceinline__ void put(u64 to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void put(u64 to, uint2 v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y)
               : "memory");
}
__device__ __forceinline__ void get(u64 from, uint4 &v) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
}
__device__ __forceinline__ void get(u64 from, uint2 &v) {
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
}
__device__ __forceinline__ bool is_here(uint4 v) {
  return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY;
}
__device__ __forceinline__ bool is_here(uint2 v) { return v.x != EMPTY && v.y != EMPTY; }
__device__ __forceinline__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Check for a timeout in a polling thread. `began`: start time, 0 at the first call. Return the
// start time, or 0 to end polling. A timeout is reported and ends all later polling.
__device__ __noinline__ u64 look(const Group &group, int peer, u64 began) {
  volatile u32 *state = group.state, *report = group.report;
  if (state[STOPPED]) return 0;
  const u64 time = now();
  if (!began) return time;
  if ((time - began) >> 10 <= state[LIMIT]) return began;
  state[STOPPED] = 1;
  report[BY_RANK] = group.rank;
  report[FOR_PEER] = peer;
  report[AT_INDEX] = group.index;
  __threadfence_system();
  report[FAILED] = 1;
  return 0;
}

// A thread's view of a collective.
struct Side {
  const Group &group;
  int slot;

  __device__ __forceinline__ explicit Side(const Group &g)
      : group(g), slot((read_past4(g.state + BASE) + g.index) % SLOTS) {}

  // Return the address of a sender's part in the reader's memory.
  __device__ __forceinline__ u64 part(int reader, int sender) const {
    return group.peers[reader] + (u64)(slot * group.count + sender) * group.part_bytes;
  }

  // Fill the previous slot with EMPTY, using `num_threads` threads. Record the size of this
  // message.
  __device__ __forceinline__ void arm(u32 num_words, u32 thread, u32 num_threads) const {
    const int last = (slot + SLOTS - 1) % SLOTS;
    const u32 used = read_past4(group.state + WORDS + last);
    if (!thread) group.state[WORDS + slot] = num_words;
    for (int sender = 0; sender < group.count; ++sender) {
      if (sender == group.rank) continue;
      const u64 begin =
          group.peers[group.rank] + (u64)(last * group.count + sender) * group.part_bytes;
      for (u32 at = thread; at < used; at += num_threads)
        put(begin + at * 16ull, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
    }
  }

  // Read `num` words of a peer, `each` bytes apart. Return when all are present or polling ends.
  template <int N, class Word>
  __device__ __forceinline__ void take(Word (&words)[N], u64 from, u64 each, int num,
                                       int peer) const {
    u64 began = 0;
    for (u32 turn = 1;; ++turn) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i < num) get(from + i * each, words[i]);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i < num) all &= is_here(words[i]);
      if (all) return;
      if (!(turn % POLLS_BETWEEN_LOOKS) && !(began = look(group, peer, began))) return;
    }
  }
};

__device__ __forceinline__ u32 full(u32 bits) { return bits == EMPTY ? 0u : bits; }
