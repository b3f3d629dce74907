// One rank's side of exchanges between the GPUs of a host: stores into the others' memory, and reads
// of its own until everything is there. No flags, no barriers, nothing assumed of the order of
// stores.
//
// Every rank has three slots in turn, and in each a part for every sender. EMPTY means "not here
// yet", and no sender sends that word. Exchange e uses slot e % 3 and fills slot e - 1 with EMPTY
// again: a peer writes there at e + 2, for which it needs our part of e + 1, sent after e has ended.
// So in every exchange every rank sends something to every other.
//
// The number of an exchange is a base in device memory plus its place within the step. The kernel
// that advances the base never releases its dependents early: whoever is launched behind it may
// read the base before its own wait.
#pragma once

#include "primitives.cuh"

typedef unsigned long long u64;

constexpr u32 EMPTY = 0x80000000u;  // -0.0
constexpr int SLOTS = 3;
constexpr u32 WRAP = 3u << 28;          // a multiple of the slots
constexpr int POLLS_BETWEEN_LOOKS = 64;  // a power of two
enum { BASE, WORDS, LIMIT = 4, STOPPED };  // of a group's state; WORDS is one of each slot
enum { FAILED, BY_RANK, FOR_PEER, AT_INDEX };  // of its report

struct Group {
  unsigned long long peers[8];  // where each rank's slots begin, as this rank reaches them
  u32 *state;             // BASE; WORDS of 16 bytes a sender used in each slot; LIMIT in 1,024 ns;
                          // STOPPED ends all polling
  u32 *report;            // in host memory, which nobody polls: thousands of threads would
  u64 part_bytes;         // of a sender in a slot
  int rank, count;
  int index, padding;     // place of the exchange within the step
};

// The rank so many places behind ours in the ring: no two begin with the same one.
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

// Of a thread that has polled in vain: when it began to (0: now), or 0 where it is to poll no longer.
// Past the limit the report says who waited for whom, and ends all later polls too.
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

// An exchange under way, seen by one thread.
struct Side {
  const Group &group;
  int slot;

  __device__ __forceinline__ explicit Side(const Group &g)
      : group(g), slot((read_past4(g.state + BASE) + g.index) % SLOTS) {}

  // Where a sender's part of this exchange lies in the memory of the rank that reads it.
  __device__ __forceinline__ u64 part(int reader, int sender) const {
    return group.peers[reader] + (u64)(slot * group.count + sender) * group.part_bytes;
  }

  // Fill the slot of the exchange before, so many threads together; remember how far this one goes.
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

  // The words of a peer, `each` bytes apart; all of them once they are here, or the poll was ended.
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
