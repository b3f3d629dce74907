// An opened program: its instructions and tensors, buffers, caches and threads.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "caches.h"
#include "collectives.h"
#include "interface.h"
#include "kernels.h"
#include "panels.h"
#include "pool.h"

namespace tw {

// Zeroed system memory, aligned to 64 bytes. Pages are allocated on first use.
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

// Selected experts per token, also sorted by expert. An entry is a token's `k`-th selection, with
// index token * top_k + k.
struct Routing {
    std::vector<int32_t> experts;            // per entry
    std::vector<float> weights;              // per entry
    std::vector<int32_t> entries, slots;     // by expert; per entry: index in this order
    std::vector<int32_t> chosen, firsts;     // used experts; start of their entries, and the end
    int32_t num_chosen = 0, top_k = 0;
};

// Taken work item count in a thread's share, for the current turn of all threads.
struct alignas(64) Pieces {
    std::atomic<uint64_t> word{0};  // the turn, then a count

    // Return the next of `count` work items, or -1.
    int64_t take(uint32_t turn, int64_t count) {
        uint64_t found = word.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t taken = found >> 32 == turn ? found & 0xffffffffu : 0;
            if ((int64_t)taken >= count) return -1;
            if (word.compare_exchange_weak(found, (uint64_t)turn << 32 | (taken + 1), std::memory_order_relaxed)) return (int64_t)taken;
        }
    }
};

// Layers with a common window. `given_back`: per slot, the freed position count.
struct CacheGroup {
    int32_t window = 0;                      // 0: no window
    int64_t step = 0, offset = 0;            // bytes per 64 positions; start in a slot
    std::vector<int32_t> given_back;
};

struct Engine {
    const Kernels* kernels;
    TwProgram program;
    std::vector<TwInstruction> instructions;
    std::vector<TwTensor> tensors;
    std::vector<TwState> states;
    std::vector<int32_t> program_widths;
    std::vector<int64_t> widths;             // per buffer, rounded up to lanes
    std::vector<Memory> buffers;
    std::vector<CacheLayout> layouts;
    std::vector<CacheGroup> groups;
    int64_t slot_bytes = 0;                  // for all positions
    Memory cache;
    std::vector<int64_t> kept_offsets;       // per state, in bytes within a slot
    int64_t kept_bytes = 0;                  // per slot
    Memory kept;
    uint8_t* row_states = nullptr;           // see tw_keep_rows
    Routing routing;
    std::vector<int32_t> angles_of;          // per instruction: table index, or -1
    std::vector<int32_t> angle_makers;       // per table: an instruction with it
    std::vector<Memory> angles;              // [tokens][cosines, sines][frequencies], scaled
    Memory operand;                          // rows common to all threads
    std::vector<Memory> scratch;             // per thread
    Memory queries;                          // all tokens and heads
    Memory partials;                         // split blocks: [slots][num_segments], partial_bytes each
    int64_t num_segments = 0, partial_bytes = 0;
    std::vector<std::atomic<int32_t>> arrived;  // per slot: finished segments
    int64_t max_padded = 0, max_query = 0, scratch_bytes = 0;
    std::unique_ptr<Pool> pool;
    std::vector<std::atomic<int32_t>> counters;
    std::vector<Pieces> pieces;              // per thread
    uint32_t turns = 0;                      // even distributions before this step
    int64_t* times = nullptr;                // per instruction; see tw_times
    std::vector<int32_t> next_products;      // per instruction: the next matmul, or itself
    int32_t head = -1;                       // the output layer, or -1
    int32_t tail = -1;                       // the last instruction before independent rows, or -1
    std::vector<int32_t> tail_buffers;       // read by independent rows
    Memory weights, unpacked;                // on large pages
    std::unique_ptr<Exchange> exchange;      // with the ranks
    std::vector<int32_t> logit_widths;       // per rank
    bool needs_peers = false, reads_hidden = false, gathers_normed = false;
    int64_t cross_width = 0;                 // columns of an image's keys and values
    int64_t max_blocks = 0;                  // per collective

    // Return a chunk's keys for a head. The values follow.
    uint8_t* cache_of(int state, int64_t slot, int64_t head, int64_t position) const {
        const CacheLayout& layout = layouts[state];
        return cache.data() + slot * slot_bytes + layout.offset + position / kPositions * layout.step + 2 * head * layout.chunk_bytes;
    }
    float* kept_after(int state, int64_t token) const { return (float*)(row_states + token * kept_bytes + kept_offsets[state]); }
    float* kept_of(int state, int slot) const { return (float*)(kept.data() + slot * kept_bytes + kept_offsets[state]); }
};

// A thread in a step.
struct Worker {
    Engine& engine;
    const TwStep& step;
    int thread;
    int32_t num_rows;      // in this instruction
    uint32_t turns = 0;    // even distributions since the start
    int region = 0;
    bool has_selected = false;  // rows are the rows for logits

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

    // Distribute `count` work items so that a thread gets the same consecutive items in every step,
    // and then items not yet started by other threads. All threads meet before and after.
    template <class Make> void share_evenly(int64_t count, Make make) {
        const int threads = engine.pool->size();
        const uint32_t turn = ++turns;
        for (int i = 0; i < threads; i++) {
            const int whose = (thread + i) % threads;
            const int64_t begin = first_of(whose, count), end = first_of(whose + 1, count);
            for (int64_t at; (at = engine.pieces[whose].take(turn, end - begin)) >= 0;)
                make(begin + at);
        }
    }
    int64_t first_of(int64_t whose, int64_t count) const { return whose * count / engine.pool->size(); }

    // Distribute `count` work items among the threads, without a final barrier.
    template <class Make> void share(int64_t count, Make make) {
        share_followed(count, [&](int64_t item, bool) { make(item); });
    }

    // `make(item, is_followed)`: is_followed marks items before this thread's next item.
    template <class Make> void share_followed(int64_t count, Make make) {
        std::atomic<int32_t>& next = engine.counters[region++];
        const int threads = engine.pool->size();
        const int64_t grain = count < 8 * threads ? 1 : count / (8 * threads);
        for (int64_t i; (i = next.fetch_add((int32_t)grain, std::memory_order_relaxed)) < count;)
            for (int64_t j = i; j < i + grain && j < count; j++) make(j, j + 1 < count && (threads == 1 || j + 1 < i + grain));
    }
};

constexpr int kQueryTokens = 16;  // prompt tokens per attention block
constexpr int kShares = 4;        // attention blocks above 1 / kShares per thread are split
constexpr int kRegions = 4;  // maximum per instruction

// Return whether independent rows are only computed for logits. Their indices ascend.
bool selects_rows(const TwStep& step);

// Free positions invisible to all later tokens, after a step.
void give_back(Engine& engine, int32_t slot, int32_t end);

void run_linear(Worker& worker, const TwInstruction& each, const TwInstruction& following);
void write_hidden(Worker& worker, const TwInstruction& head, const TwPlace& from);
void run_attend(Worker& worker, const TwInstruction& each, int32_t index);
void make_angles(Worker& worker);
void copy_weights(Engine& engine);
void run_route(Worker& worker, const TwInstruction& each);
void run_experts(Worker& worker, const TwInstruction& each);
void run_convolve(Worker& worker, const TwInstruction& each);
void run_delta_rule(Worker& worker, const TwInstruction& each);
void run_cross_attend(Worker& worker, const TwInstruction& each);

inline uint8_t* const kNowhere = (uint8_t*)64;  // a base address to measure a layout

// Scratch bytes of an instruction, per thread and for rows common to all threads.
int64_t experts_scratch(const TwTensor& weight, const TwInstruction& each, int64_t num_tokens);
int64_t experts_operand(const TwTensor& weight, const TwInstruction& each, int64_t num_tokens);
int64_t delta_scratch(const TwState& state);

}  // namespace tw
