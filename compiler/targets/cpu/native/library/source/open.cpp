// Opens a program: checks, memory and threads.

#include <sys/mman.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <set>
#include <string>

#include "check.h"
#include "executor.h"

namespace tw {

#if defined(TW_GUARDS)
constexpr int64_t kPage = 4096;  // in checks: the next page must not be touched
#else
constexpr int64_t kPage = 0;
#endif

Memory::Memory(int64_t num_bytes) : num_bytes_(num_bytes) {
    if (num_bytes <= 0) return;
    const int64_t size = kPage ? rounded(num_bytes, kPage) : num_bytes;
    void* found = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    data_ = (uint8_t*)found;
    if (!kPage) return;
    mprotect(data_ + size, kPage, PROT_NONE);
    data_ += size - rounded(num_bytes, 64);
}

Memory::Memory(Memory&& other) noexcept : data_(other.data_), num_bytes_(other.num_bytes_) { other.data_ = nullptr; }

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
}

Memory::~Memory() {
    if (!data_) return;
    const int64_t size = kPage ? rounded(num_bytes_, kPage) : num_bytes_;
    munmap(kPage ? data_ - (size - rounded(num_bytes_, 64)) : data_, size + kPage);
}

void Memory::release(int64_t first, int64_t num_bytes) {
    if (madvise(data_ + first, num_bytes, MADV_DONTNEED)) std::memset(data_ + first, 0, num_bytes);
}

void Memory::use_large_pages() {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, from = ((uintptr_t)data_ + page - 1) / page * page;
    madvise((void*)from, (uintptr_t)data_ + num_bytes_ - from, MADV_HUGEPAGE);  // fails harmlessly without large pages
#endif
}

namespace {

const Kernels* choose(int32_t isa) {
    const int32_t best = tw_best_isa();
#if defined(__aarch64__)
    const std::string names[] = {"plain C++", "NEON with dot products", "a third"};
#else
    const std::string names[] = {"plain C++", "AVX2", "AVX-512 with VNNI and BF16"};
#endif
    if (isa < -1 || isa > best)
        throw Refused((is_between(isa, 0, 3) ? names[isa] : "instruction set " + std::to_string(isa)) + " is not on this machine; allowed: " + names[best] + ", or -1 for it");
#if defined(__aarch64__)
    const Kernels* (*const tables[])() = {scalar_kernels, neon_kernels};
#else
    const Kernels* (*const tables[])() = {scalar_kernels, avx2_kernels, avx512_kernels};
#endif
    const int32_t used = isa < 0 ? best : isa;
    if (!tables[used]) throw Refused(names[used] + " is not in this library; allowed: -1");
    return tables[used]();
}

constexpr double kMostState = 0x1p46;  // bytes; larger sums could overflow

// Number of positions visible to the reader of a state. 0: all.
int32_t window_of(const Engine& engine, size_t state) {
    int32_t most = -1;
    for (const TwInstruction& each : engine.instructions)
        if (each.op == TW_ATTEND && each.state == (int32_t)state)
            most = each.window > 0 && most != 0 ? std::max(most, each.window) : 0;
    return most < engine.program.max_context ? std::max(most, 0) : 0;
}

CacheGroup& group_of(Engine& engine, int32_t window) {
    for (CacheGroup& each : engine.groups)
        if (each.window == window) return each;
    engine.groups.push_back({window, 0, 0, std::vector<int32_t>(engine.program.max_num_seqs)});
    return engine.groups.back();
}

void place_caches(Engine& engine) {
    const double num_chunks = (double)rounded(engine.program.max_context, kPositions) / kPositions;
    double wanted = 0;
    for (const TwState& state : engine.states) {
        double of_slot = state.kind == TW_KEYS_VALUES ? 2.0 * state.num_heads * num_chunks * CacheLayout(state).chunk_bytes : 4.0 * num_kept(state);
        wanted += (of_slot + 8192) * engine.program.max_num_seqs;
    }
    if (wanted > kMostState) throw std::bad_alloc();
    for (size_t i = 0; i < engine.states.size(); i++) {
        CacheGroup& group = group_of(engine, window_of(engine, i));
        engine.layouts.emplace_back(engine.states[i]);
        engine.layouts[i].offset = group.step;
        group.step += 2 * engine.states[i].num_heads * engine.layouts[i].chunk_bytes;
    }
    for (CacheGroup& group : engine.groups) {
        group.offset = engine.slot_bytes;
        engine.slot_bytes += rounded((int64_t)num_chunks * group.step, 4096);
    }
    for (size_t i = 0; i < engine.states.size(); i++) {
        const CacheGroup& group = group_of(engine, window_of(engine, i));
        engine.layouts[i].offset += group.offset;
        engine.layouts[i].step = group.step;
    }
    engine.cache = Memory(engine.slot_bytes * engine.program.max_num_seqs);
    if (engine.program.large_pages) engine.cache.use_large_pages();
    for (const TwState& state : engine.states) {
        engine.kept_offsets.push_back(engine.kept_bytes);
        engine.kept_bytes += rounded(num_kept(state) * 4, 64);
    }
    engine.kept_bytes = rounded(engine.kept_bytes, 4096);
    engine.kept = Memory(engine.kept_bytes * engine.program.max_num_seqs);
}

void place_routing(Engine& engine) {
    int64_t num_entries = 0, num_experts = 0;
    for (const TwInstruction& each : engine.instructions) {
        if (each.op != TW_ROUTE) continue;
        num_entries = std::max<int64_t>(num_entries, (int64_t)engine.program.max_tokens * each.top_k);
        num_experts = std::max<int64_t>(num_experts, each.num_experts);
    }
    Routing& routing = engine.routing;
    for (auto* list : {&routing.experts, &routing.entries, &routing.slots}) list->resize(num_entries);
    routing.weights.resize(num_entries);
    routing.chosen.resize(num_experts);
    routing.firsts.resize(num_experts + 1);
}

void place_buffers(Engine& engine) {
    const int64_t tokens = engine.program.max_tokens;
    int64_t attend_bytes = 0, mixer_bytes = 0, operand_bytes = 0;
    for (const TwTensor& each : engine.tensors)
        if (each.kind != TW_VECTOR) engine.max_padded = std::max(engine.max_padded, rounded(each.columns, kBlock));
    for (size_t i = 0; i < engine.instructions.size(); i++) {
        const TwInstruction& each = engine.instructions[i];
        engine.angles_of.push_back(-1);
        if (each.op == TW_DELTA_RULE) mixer_bytes = std::max(mixer_bytes, delta_scratch(engine.states[each.state]));
        if (each.op == TW_ROUTE) mixer_bytes = std::max<int64_t>(mixer_bytes, each.num_experts * 4 + 64);
        if (each.op == TW_EXPERTS || each.op == TW_EXPERT_SUM) {
            const TwTensor& weight = engine.tensors[each.weight];
            mixer_bytes = std::max(mixer_bytes, experts_scratch(weight, each, tokens));
            operand_bytes = std::max(operand_bytes, experts_operand(weight, each, tokens));
        }
        if (each.op != TW_ATTEND) continue;
        const CacheLayout& layout = engine.layouts[each.state];
        engine.max_query = std::max(engine.max_query, each.num_heads * layout.dim * 4);
        int64_t rows = rounded(kQueryTokens * each.num_heads / engine.states[each.state].num_heads, 16);
        engine.partial_bytes = std::max(engine.partial_bytes, rows * (layout.dim + 2) * 4);
        attend_bytes = std::max(attend_bytes, rows * layout.dim * 12 + rows * 6 * 4 + 4096 + layout.unpacked_bytes());
        size_t table = 0;
        for (; table < engine.angle_makers.size(); table++) {
            const TwInstruction& maker = engine.instructions[engine.angle_makers[table]];
            if (maker.other == each.other && maker.factor == each.factor) break;
        }
        if (table == engine.angle_makers.size()) {
            engine.angle_makers.push_back((int32_t)i);
            engine.angles.emplace_back(tokens * engine.tensors[each.other].rows * 8);
        }
        engine.angles_of.back() = (int32_t)table;
    }
    for (int32_t i = 0; i < engine.program.num_buffers; i++) {
        engine.widths.push_back(rounded(engine.program.widths[i], kLanes));
        engine.buffers.emplace_back(i == engine.program.logits ? 0 : tokens * engine.widths[i] * 4);
    }
    engine.operand = Memory(std::max(tokens * engine.max_padded * 5 + 4096, operand_bytes));
    engine.queries = Memory(tokens * engine.max_query + 64);
    const int64_t num_slots = kShares * engine.program.num_threads;
    engine.num_segments = rounded(engine.program.max_context, kSegment) / kSegment;
    engine.arrived = std::vector<std::atomic<int32_t>>(num_slots);
    if (engine.program.num_threads > 1) engine.partials = Memory(num_slots * engine.num_segments * engine.partial_bytes);
    engine.scratch_bytes = std::max({engine.max_padded * 160 + 4096, attend_bytes, mixer_bytes});
    for (int32_t i = 0; i < engine.program.num_threads; i++) engine.scratch.emplace_back(engine.scratch_bytes);
}

void find_next_products(Engine& engine) {
    const int32_t count = (int32_t)engine.instructions.size();
    engine.next_products.resize(count);
    for (int32_t i = 0; i < count; i++) {
        int32_t next = i;
        do next = (next + 1) % count;
        while (next != i && engine.instructions[next].op != TW_LINEAR);
        engine.next_products[i] = next;
    }
}

// The first matmul of gathered rows. Ranks have the final norm in an instruction before it.
void find_head(Engine& engine) {
    bool gathered = false;
    for (size_t i = 0; i < engine.instructions.size() && engine.head < 0; i++) {
        const TwInstruction& each = engine.instructions[i];
        if (i && each.op == TW_GATHER && engine.instructions[i - 1].op == TW_NORM)
            engine.gathers_normed = engine.instructions[i - 1].out.buffer == each.x.buffer;
        gathered = gathered || each.op == TW_GATHER;
        if (gathered && engine.instructions[i].op == TW_LINEAR) engine.head = (int32_t)i;
    }
}

// Steps select the rows for logits after the last layer's attention.
void find_tail(Engine& engine) {
    const std::vector<TwInstruction>& all = engine.instructions;
    const int32_t gather = (int32_t)(std::find_if(all.begin(), all.end(), [](auto& each) { return each.op == TW_GATHER; }) - all.begin());
    int32_t first = gather;
    auto is_independent = [](const TwInstruction& each) {
        return each.op == TW_LINEAR || each.op == TW_SWIGLU || each.op == TW_SIGMOID_GATE || each.op == TW_NORM || each.op == TW_ELEMENTWISE;
    };
    while (first > 1 && is_independent(all[first - 1]) && !(all[first - 1].flags & TW_CROSS)) first--;
    if (gather == (int32_t)all.size() || first == gather) return;
    engine.tail = first - 1;
    std::set<int32_t> read;
    for (int32_t i = first; i <= gather; i++) {
        for (const TwPlace* place : {&all[i].x, &all[i].y, &all[i].z, &all[i].gate}) read.insert(place->buffer);
        if (all[i].flags & TW_RESIDUAL) read.insert(all[i].out.buffer);
    }
    read.erase(-1);
    engine.tail_buffers.assign(read.begin(), read.end());
}

Engine* open_program(const TwProgram& program) {
    check_program(program);
    auto engine = std::make_unique<Engine>();
    engine->kernels = choose(program.isa);
    engine->program = program;
    engine->instructions.assign(program.instructions, program.instructions + program.num_instructions);
    engine->tensors.assign(program.tensors, program.tensors + program.num_tensors);
    engine->states.assign(program.states, program.states + program.num_states);
    place_caches(*engine);
    place_routing(*engine);
    place_buffers(*engine);
    engine->program.instructions = engine->instructions.data();
    engine->program.tensors = engine->tensors.data();
    engine->program.states = engine->states.data();
    engine->program_widths.assign(program.widths, program.widths + program.num_buffers);
    engine->program.widths = engine->program_widths.data();
    size_t regions = engine->instructions.size() * kRegions + engine->angle_makers.size();
    engine->counters = std::vector<std::atomic<int32_t>>(regions);
    engine->pieces = std::vector<Pieces>(program.num_threads);
    find_next_products(*engine);
    find_head(*engine);
    find_tail(*engine);
    for (const TwInstruction& each : engine->instructions) {
        engine->reads_hidden = engine->reads_hidden || each.op == TW_READ_HIDDEN;
        engine->needs_peers = engine->needs_peers || each.op == TW_ALL_REDUCE || each.op == TW_GATHER_LOGITS;
        if (each.op == TW_CROSS_ATTEND)
            engine->cross_width = std::max(engine->cross_width, each.window + 2 * (int64_t)each.num_key_heads * engine->tensors[each.norm].rows);
        if (each.op == TW_ALL_REDUCE) engine->max_blocks = std::max(engine->max_blocks, rounded(each.x.width, kWireBlock) / kWireBlock * program.max_tokens);
    }
    engine->pool = std::make_unique<Pool>(program.num_threads);
    if (program.large_pages) copy_weights(*engine);
    return engine.release();
}

}  // namespace
}  // namespace tw

extern "C" {

int32_t tw_version() { return TW_VERSION; }

int32_t tw_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    [[maybe_unused]] const bool has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
                   __builtin_cpu_supports("avx512bf16");
#ifndef TW_NO_AVX512  // measurements without AVX-512: CXXFLAGS=-DTW_NO_AVX512
    if (has_512) return 2;
#endif
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 1;
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) return 1;
#elif defined(__aarch64__) && defined(__APPLE__)
    return 1;
#endif
    return 0;
}

void* tw_open(const TwProgram* program, char* error, int32_t error_size) {
    try {
        return tw::open_program(*program);
    } catch (const std::bad_alloc&) {
        std::snprintf(error, error_size, "no memory for its caches and buffers");
    } catch (const std::exception& found) {
        std::snprintf(error, error_size, "%s", found.what());
    }
    return nullptr;
}

void tw_close(void* engine) { delete (tw::Engine*)engine; }

}
