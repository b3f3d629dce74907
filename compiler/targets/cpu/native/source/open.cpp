// Opening a program: every number of it is checked, then memory and threads are made.

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "engine.h"

namespace tw {

Memory::Memory(int64_t num_bytes) : num_bytes_(num_bytes) {
    if (num_bytes <= 0) return;
    void* found = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    data_ = (uint8_t*)found;
}

Memory::Memory(Memory&& other) noexcept : data_(other.data_), num_bytes_(other.num_bytes_) { other.data_ = nullptr; }

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
}

Memory::~Memory() {
    if (data_) munmap(data_, num_bytes_);
}

void Memory::release(int64_t first, int64_t num_bytes) {
    if (madvise(data_ + first, num_bytes, MADV_DONTNEED)) std::memset(data_ + first, 0, num_bytes);
}

namespace {

struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& what) {
    if (!holds) throw Refused(what);
}

bool is_between(int64_t value, int64_t least, int64_t end) { return value >= least && value < end; }

constexpr int32_t kMost = 1 << 24;  // of rows, columns, widths and positions

struct Checked {
    const TwProgram& program;
    std::string where;

    void holds(bool value, const char* what) const { require(value, where + ": " + what); }

    void place(const TwPlace& place, const char* name) const {
        holds(is_between(place.buffer, 0, program.num_buffers), name);
        holds(place.first >= 0 && place.width > 0 && place.width <= kMost, name);
        holds((int64_t)place.first + place.width <= program.widths[place.buffer], name);
    }

    const TwTensor& tensor(int32_t index, const char* name) const {
        holds(is_between(index, 0, program.num_tensors), name);
        return program.tensors[index];
    }

    void vector(int32_t index, int64_t count, const char* name) const {
        const TwTensor& found = tensor(index, name);
        holds(found.kind == TW_VECTOR && found.rows == count, name);
    }

    const TwTensor& panels(int32_t index, int64_t rows, int64_t columns, bool paired) const {
        const TwTensor& found = tensor(index, "weight");
        holds(found.kind != TW_VECTOR && found.rows == rows && found.columns == columns, "weight");
        uint64_t wanted = num_panels(rows, paired) * panel_size(found.kind, columns).total;
        holds(found.num_bytes == wanted, "bytes of its weight");
        return found;
    }
};

void check_linear(const Checked& checked, const TwInstruction& each) {
    const bool paired = each.flags & TW_PAIRED;
    checked.place(each.x, "x");
    const int64_t rows = (int64_t)each.out.width * (paired ? 2 : 1);
    const TwTensor& weight = checked.panels(each.weight, rows, each.x.width, paired);
    if (each.norm >= 0) checked.vector(each.norm, each.x.width, "norm");
    if (each.bias >= 0) checked.vector(each.bias, num_panels(rows, paired) * kLanes, "bias");
    for (int32_t arithmetic : each.arithmetic) {
        checked.holds(is_between(arithmetic, 0, TW_NUM_ARITHMETICS), "arithmetic");
        bool scaled = in_blocks(weight.kind) && !(weight.kind == TW_Q41 && arithmetic == TW_AS_BF16);
        bool fits = arithmetic == TW_AS_FP32 || scaled ||
                    (arithmetic == TW_AS_BF16 && weight.kind == TW_BF16);
        checked.holds(fits, "arithmetic of its weight");
    }
}

void check_attend(const Checked& checked, const TwInstruction& each) {
    checked.place(each.x, "x");
    checked.holds(is_between(each.state, 0, checked.program.num_states), "state");
    const TwState& state = checked.program.states[each.state];
    const int64_t heads = each.num_heads, dim = state.head_dim;
    checked.holds(is_between(heads, 1, kMost) && heads % state.num_heads == 0, "heads");
    checked.holds(each.out.width == heads * dim && each.x.width == (heads + 2 * state.num_heads) * dim, "width");
    const TwTensor& frequencies = checked.tensor(each.other, "frequencies");
    checked.holds(frequencies.kind == TW_VECTOR && 2 * (int64_t)frequencies.rows <= dim, "frequencies");
    checked.holds(each.window >= 0, "window");
}

void check_norm_heads(const Checked& checked, const TwInstruction& each) {
    checked.place(each.x, "x");
    const int64_t dim = checked.tensor(each.norm, "norm").rows;
    checked.vector(each.norm, dim, "norm");
    checked.vector(each.other, dim, "norm of keys");
    bool fits = each.out.width == each.x.width && is_between(each.num_heads, 1, kMost) && dim > 0 &&
                each.x.width % dim == 0 && (each.x.width / dim - each.num_heads) % 2 == 0 && each.x.width / dim > each.num_heads;
    checked.holds(fits, "width");
}

void check_instruction(const TwProgram& program, int32_t index) {
    const TwInstruction& each = program.instructions[index];
    const Checked checked{program, "instruction " + std::to_string(index)};
    checked.place(each.out, "out");
    switch (each.op) {
        case TW_EMBED: {
            const TwTensor& table = checked.tensor(each.weight, "table");
            checked.panels(each.weight, table.rows, each.out.width, false);
            break;
        }
        case TW_LINEAR: check_linear(checked, each); break;
        case TW_ATTEND: check_attend(checked, each); break;
        case TW_NORM_HEADS: check_norm_heads(checked, each); break;
        case TW_NORM: checked.vector(each.norm, each.out.width, "norm"); [[fallthrough]];
        case TW_GATHER:
            checked.place(each.x, "x");
            checked.holds(each.x.width == each.out.width, "width");
            break;
        case TW_SWIGLU: case TW_SIGMOID_GATE: case TW_ELEMENTWISE:
            checked.place(each.x, "x");
            checked.holds(each.x.width == each.out.width, "width");
            checked.holds(each.op != TW_ELEMENTWISE || is_between(each.function, 0, TW_NUM_FUNCTIONS), "function");
            if (each.y.buffer >= 0 || each.op != TW_ELEMENTWISE) {
                checked.place(each.y, "y");
                bool one = each.op == TW_SIGMOID_GATE && each.y.width == 1;
                checked.holds(one || each.y.width == each.out.width, "width");
            }
            break;
        default: checked.holds(false, "no such operation");
    }
}

void check_program(const TwProgram& program) {
    require(program.size == sizeof(TwProgram) && program.version == TW_VERSION &&
            program.instruction_size == sizeof(TwInstruction) && program.tensor_size == sizeof(TwTensor),
            "a program of another version");
    require(is_between(program.num_threads, 1, 4096), "threads");
    require(is_between(program.max_seats, 1, 1 << 20) && is_between(program.max_context, 1, kMost), "seats or context");
    require(is_between(program.max_tokens, 1, 1 << 16), "tokens of a step");
    for (int32_t i = 0; i < program.num_buffers; i++) require(is_between(program.widths[i], 1, kMost), "width of a buffer");
    for (int32_t i = 0; i < program.num_states; i++) {
        const TwState& state = program.states[i];
        require(is_between(state.num_heads, 1, 1 << 16) && is_between(state.head_dim, 1, 1 << 12) &&
                is_between(state.mantissa_bits, 0, 8), "state " + std::to_string(i));
    }
    for (int32_t i = 0; i < program.num_tensors; i++) {
        const TwTensor& tensor = program.tensors[i];
        const std::string name = "tensor " + std::to_string(i);
        require(is_between(tensor.kind, 0, TW_NUM_KINDS) && is_between(tensor.rows, 1, kMost) &&
                is_between(tensor.columns, 1, kMost) && tensor.data, name);
        require((uintptr_t)tensor.data % 64 == 0, name + ": its alignment");
        if (tensor.kind == TW_VECTOR) require(tensor.columns == 1 && tensor.num_bytes == (uint64_t)tensor.rows * 4, name);
    }
    require(is_between(program.logits, 0, program.num_buffers), "logits");
    require(program.num_instructions > 0 && program.instructions[0].op == TW_EMBED, "no embedding first");
    bool gathered = false;  // logits have a row for each that is gathered, and no more
    for (int32_t i = 0; i < program.num_instructions; i++) {
        const TwInstruction& each = program.instructions[i];
        check_instruction(program, i);
        gathered = gathered || each.op == TW_GATHER;
        bool logits = false;
        for (const TwPlace* place : {&each.out, &each.x, &each.y}) logits = logits || place->buffer == program.logits;
        require(gathered ? each.op != TW_ATTEND && each.op != TW_EMBED : !logits, "instruction " + std::to_string(i) + ": its order");
        require(each.op != TW_GATHER || !logits, "rows are gathered into logits");
    }
}

const Kernels* choose(int32_t isa) {
    const int32_t best = tw_best_isa();
    require(isa >= -1 && isa <= best, "instruction set " + std::to_string(isa) + " on a machine that has up to " + std::to_string(best));
#if defined(__x86_64__)
    switch (isa < 0 ? best : isa) {
        case 2: return avx512_kernels();
        case 1: return avx2_kernels();
    }
#endif
    return scalar_kernels();
}

void place_caches(Engine& engine) {
    int64_t total = 0;
    for (const TwState& state : engine.states) {
        engine.layouts.emplace_back(state, engine.program.max_context);
        engine.cache_offsets.push_back(total);
        total += engine.layouts.back().seat_bytes * engine.program.max_seats;
    }
    engine.cache = std::make_unique<Memory>(total);
}

void place_buffers(Engine& engine) {
    const int64_t tokens = engine.program.max_tokens;
    int64_t attend_bytes = 0;
    for (const TwTensor& each : engine.tensors)
        if (each.kind != TW_VECTOR) engine.max_wide = std::max(engine.max_wide, rounded(each.columns, kBlock));
    for (size_t i = 0; i < engine.instructions.size(); i++) {
        const TwInstruction& each = engine.instructions[i];
        engine.angles_of.push_back(-1);
        if (each.op != TW_ATTEND) continue;
        const CacheLayout& layout = engine.layouts[each.state];
        engine.max_query = std::max(engine.max_query, each.num_heads * layout.dim * 4);
        int64_t rows = rounded(16 * each.num_heads / engine.states[each.state].num_heads, 16);
        attend_bytes = std::max(attend_bytes, rows * layout.dim * 12 + rows * 6 * 4 + 4096);
        size_t table = 0;
        while (table < engine.frequencies.size() && engine.frequencies[table] != each.other) table++;
        if (table == engine.frequencies.size()) {
            engine.frequencies.push_back(each.other);
            engine.angles.emplace_back(tokens * engine.tensors[each.other].rows * 8);
        }
        engine.angles_of.back() = (int32_t)table;
    }
    for (int32_t i = 0; i < engine.program.num_buffers; i++) {
        engine.widths.push_back(rounded(engine.program.widths[i], kLanes));
        engine.buffers.emplace_back(i == engine.program.logits ? 0 : tokens * engine.widths[i] * 4);
    }
    engine.operand = Memory(tokens * engine.max_wide * 5 + 4096);
    engine.queries = Memory(tokens * engine.max_query + 64);
    engine.scratch_bytes = std::max(engine.max_wide * 160 + 4096, attend_bytes);
    for (int32_t i = 0; i < engine.program.num_threads; i++) engine.scratch.emplace_back(engine.scratch_bytes);
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
    place_buffers(*engine);
    engine->program.instructions = engine->instructions.data();
    engine->program.tensors = engine->tensors.data();
    engine->program.states = engine->states.data();
    engine->program_widths.assign(program.widths, program.widths + program.num_buffers);
    engine->program.widths = engine->program_widths.data();
    size_t regions = engine->instructions.size() * kRegions + engine->frequencies.size();
    engine->counters = std::vector<std::atomic<int32_t>>(regions);
    engine->pool = std::make_unique<Pool>(program.num_threads);
    return engine.release();
}

}  // namespace
}  // namespace tw

extern "C" {

int32_t tw_version() { return TW_VERSION; }

int32_t tw_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
                   __builtin_cpu_supports("avx512bf16");
    if (has_512) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 1;
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
