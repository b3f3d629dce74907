// An opened program: its instructions and tensors, buffers, caches and threads.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "caches.h"
#include "exchange.h"
#include "interface.h"
#include "kernels.h"
#include "panels.h"
#include "pool.h"

namespace tw {

// Bytes of zeros at a multiple of 64, from the system; touched only where they are used.
class Memory {
  public:
    explicit Memory(int64_t num_bytes = 0);
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    ~Memory();
    uint8_t* data() const { return data_; }
    void release(int64_t first, int64_t num_bytes);  // zeros again

    void use_large_pages();

  private:
    uint8_t* data_ = nullptr;
    int64_t num_bytes_ = 0;
};

// Which experts each token goes to, and the same sorted by expert: an entry is a token's `k`-th
// choice, at token * top_k + k.
struct Routing {
    std::vector<int32_t> experts;            // of entries
    std::vector<float> weights;              // of entries
    std::vector<int32_t> entries, slots;     // in order of experts; of entries: where in that order
    std::vector<int32_t> chosen, firsts;     // experts that have entries; where theirs begin, and the end
    int32_t num_chosen = 0, top_k = 0;
};

// How many of a thread's own pieces of work are taken, of the turn that all threads are in.
struct alignas(64) Pieces {
    std::atomic<uint64_t> word{0};  // the turn, then a count

    // The next of so many pieces; -1 where all are taken.
    int64_t take(uint32_t turn, int64_t count) {
        uint64_t found = word.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t taken = found >> 32 == turn ? found & 0xffffffffu : 0;
            if ((int64_t)taken >= count) return -1;
            if (word.compare_exchange_weak(found, (uint64_t)turn << 32 | (taken + 1), std::memory_order_relaxed)) return (int64_t)taken;
        }
    }
};

// Layers of one window. `given_back`: of seats, the positions before it that are held no more.
struct CacheGroup {
    int32_t window = 0;                      // 0: every position is seen
    int64_t step = 0, offset = 0;            // of 64 positions; of the group in a seat
    std::vector<int32_t> given_back;
};

struct Engine {
    const Kernels* kernels;
    TwProgram program;
    std::vector<TwInstruction> instructions;
    std::vector<TwTensor> tensors;
    std::vector<TwState> states;
    std::vector<int32_t> program_widths;
    std::vector<int64_t> widths;             // of buffers, rounded to whole lanes
    std::vector<Memory> buffers;
    std::vector<CacheLayout> layouts;
    std::vector<CacheGroup> groups;
    int64_t seat_bytes = 0;                  // of all positions
    Memory cache;
    std::vector<int64_t> kept_offsets;       // of states, in bytes of what a seat keeps
    int64_t kept_bytes = 0;                  // of a seat
    Memory kept;
    Routing routing;
    std::vector<int32_t> angles_of;          // of instructions: which table of angles, or -1
    std::vector<int32_t> angle_makers;       // of tables: an instruction that reads it
    std::vector<Memory> angles;              // [tokens][cosines, sines][frequencies], by its factor
    Memory operand;                          // of many rows, for all threads
    std::vector<Memory> scratch;             // of threads
    Memory queries;                          // of all tokens and heads
    Memory partials;                         // of split blocks: [slots][num_segments], partial_bytes each
    int64_t num_segments = 0, partial_bytes = 0;
    std::vector<std::atomic<int32_t>> arrived;  // of slots: segments that are done
    int64_t max_wide = 0, max_query = 0, scratch_bytes = 0;
    std::unique_ptr<Pool> pool;
    std::vector<std::atomic<int32_t>> counters;
    std::vector<Pieces> pieces;              // of threads
    uint32_t turns = 0;                      // of even sharing, before the present step
    int64_t* times = nullptr;                // of instructions; see tw_times
    std::vector<int32_t> next_products;      // of instructions: the next product, or this one
    int32_t head = -1;                       // the product that makes the logits of gathered rows, or -1
    Memory weights, unpacked;                // where they are held on large pages
    std::unique_ptr<Exchange> exchange;      // with other ranks
    std::vector<int32_t> logit_widths;       // of ranks
    bool needs_peers = false;
    int64_t max_blocks = 0;                  // of an exchange

    // The keys of a head in 64 positions; its values follow.
    uint8_t* cache_of(int state, int64_t seat, int64_t head, int64_t position) const {
        const CacheLayout& layout = layouts[state];
        return cache.data() + seat * seat_bytes + layout.offset + position / kPositions * layout.step + 2 * head * layout.chunk_bytes;
    }
    float* kept_of(int state, int seat) const { return (float*)(kept.data() + seat * kept_bytes + kept_offsets[state]); }
};

// Of one thread in one step.
struct Worker {
    Engine& engine;
    const TwStep& step;
    int thread;
    int32_t num_rows;      // of the present instruction
    uint32_t turns = 0;    // of even sharing, since the program was opened
    int region = 0;

    const Kernels& kernels() const { return *engine.kernels; }
    uint8_t* scratch() const { return engine.scratch[thread].data(); }
    const float* vector(int32_t tensor) const { return (const float*)engine.tensors[tensor].data; }

    float* at(const TwPlace& place, int64_t row) const {
        float* base = place.buffer == engine.program.logits ? step.logits : (float*)engine.buffers[place.buffer].data();
        return base + row * stride(place) + place.first;
    }
    int64_t stride(const TwPlace& place) const {
        bool is_logits = place.buffer == engine.program.logits;
        return is_logits ? engine.program.widths[place.buffer] : engine.widths[place.buffer];
    }

    void meet() { engine.pool->meet(thread); }

    // Share `count` pieces of work so that a thread makes the same ones in every step, one after
    // another, and then what others have not begun. All threads meet before it and after it.
    // `make(piece, is_last)`: the last of a thread's own.
    template <class Make> void share_evenly(int64_t count, Make make) {
        const int threads = engine.pool->size();
        const uint32_t turn = ++turns;
        for (int i = 0; i < threads; i++) {
            const int whose = (thread + i) % threads;
            const int64_t begin = first_of(whose, count), end = first_of(whose + 1, count);
            for (int64_t at; (at = engine.pieces[whose].take(turn, end - begin)) >= 0;)
                make(begin + at, i == 0 && begin + at + 1 == end);
        }
    }
    int64_t first_of(int64_t whose, int64_t count) const { return whose * count / engine.pool->size(); }

    // Share `count` pieces of work among the threads; ends without waiting for the others.
    template <class Make> void share(int64_t count, Make make) {
        std::atomic<int32_t>& next = engine.counters[region++];
        int64_t grain = count / (8 * engine.pool->size());
        if (grain < 1) grain = 1;
        for (int64_t i; (i = next.fetch_add((int32_t)grain, std::memory_order_relaxed)) < count;)
            for (int64_t j = i; j < i + grain && j < count; j++) make(j);
    }
};

constexpr int kQueryTokens = 16;  // of a prompt, that attend as one block
constexpr int kShares = 4;        // of a thread: attention of a larger part is split; 4 times the threads are slots
constexpr int kRegions = 4;  // at most, of an instruction

// After a step: what lies so far before a seat's end that no token will see it.
void give_back(Engine& engine, int32_t seat, int32_t end);

void run_linear(Worker& worker, const TwInstruction& each, const TwInstruction& following);
void run_hidden(Worker& worker, const TwInstruction& head);
void run_attend(Worker& worker, const TwInstruction& each, int32_t index);
void make_angles(Worker& worker);
void copy_weights(Engine& engine);
void run_route(Worker& worker, const TwInstruction& each);
void run_experts(Worker& worker, const TwInstruction& each);
void run_convolve(Worker& worker, const TwInstruction& each);
void run_delta_rule(Worker& worker, const TwInstruction& each);

inline uint8_t* const kNowhere = (uint8_t*)64;  // to lay out what is only to be measured

// Bytes that an instruction needs of a thread's scratch, and for rows that all threads read.
int64_t experts_scratch(const TwTensor& weight, const TwInstruction& each, int64_t num_tokens);
int64_t experts_operand(const TwTensor& weight, const TwInstruction& each, int64_t num_tokens);
int64_t delta_scratch(const TwState& state);

}  // namespace tw
