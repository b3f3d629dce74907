// Checks every number in a program before the program runs.

#include "check.h"

namespace tw {
namespace {

// Operations with shared outputs: threads divide columns, heads or rows, and all threads read x.
void check_apart(const Checked& checked, const TwInstruction& each) {
    for (int32_t op : {TW_LINEAR, TW_ATTEND, TW_GATHER, TW_EXPERTS, TW_CONVOLVE, TW_DELTA_RULE, TW_CROSS_ATTEND, TW_ADD_GATED}) {
        const bool meets = each.x.buffer == each.out.buffer && each.x.first < each.out.first + each.out.width &&
                           each.out.first < each.x.first + each.x.width;
        checked.holds(each.op != op || !meets, "what it writes is what it reads");
    }
}

void check_linear(const Checked& checked, const TwInstruction& each) {
    const bool paired = each.flags & TW_PAIRED;
    checked.place(each.x, "x");
    const int64_t rows = (int64_t)each.out.width * (paired ? 2 : 1);
    const TwTensor& weight = checked.panels(each.weight, rows, each.x.width, paired);
    if (each.norm >= 0) checked.vector(each.norm, each.x.width, "norm");
    if (each.bias >= 0) checked.vector(each.bias, num_panels(rows, paired) * kLanes, "bias");
    checked.arithmetics(each, weight.kind);
}

void check_attend(const Checked& checked, const TwInstruction& each) {
    checked.place(each.x, "x");
    const TwState& state = checked.state(each.state, TW_KEYS_VALUES);
    const int64_t heads = each.num_heads, dim = state.head_dim;
    checked.holds(is_between(heads, 1, kMost) && heads % state.num_heads == 0, "heads");
    checked.holds(each.out.width == heads * dim && each.x.width == (heads + 2 * state.num_heads) * dim, "width");
    const TwTensor& frequencies = checked.tensor(each.other, "frequencies");
    checked.holds(frequencies.kind == TW_VECTOR && 2 * (int64_t)frequencies.rows <= dim, "frequencies");
    checked.holds(each.window >= 0, "window");
    if (each.bias >= 0) checked.vector(each.bias, heads, "sinks");
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

void check_cross_attend(const Checked& checked, const TwInstruction& each) {
    checked.place(each.x, "x");
    const int64_t dim = checked.tensor(each.norm, "norm").rows;
    checked.vector(each.norm, dim, "norm");
    checked.holds(is_between(dim, 1, kMaxCrossHead + 1), "channels of a head");
    checked.holds(is_between(each.num_heads, 1, kMost) && is_between(each.num_key_heads, 1, kMost) && each.num_heads % each.num_key_heads == 0, "heads");
    checked.holds(each.out.width == each.num_heads * dim && each.x.width == each.out.width, "width");
    checked.holds(is_between(each.window, 0, kMost), "columns of keys");
}

void check_instruction(const TwProgram& program, int32_t index, Routed& routed) {
    const TwInstruction& each = program.instructions[index];
    const Checked checked{program, "instruction " + std::to_string(index)};
    if (each.op != TW_ROUTE) checked.place(each.out, "out");
    if (each.op == TW_GATHER) routed = {};
    for (const TwPlace* place : {&each.x, &each.y, &each.z, &each.gate})  // also unused places
        if (place->buffer != -1) checked.place(*place, "a place");
    check_apart(checked, each);
    switch (each.op) {
        case TW_EMBED: {
            const TwTensor& table = checked.tensor(each.weight, "table");
            checked.panels(each.weight, table.rows, each.out.width, false);
            break;
        }
        case TW_READ_HIDDEN: break;
        case TW_LINEAR: check_linear(checked, each); break;
        case TW_ATTEND: check_attend(checked, each); break;
        case TW_NORM_HEADS: check_norm_heads(checked, each); break;
        case TW_CROSS_ATTEND: check_cross_attend(checked, each); break;
        case TW_ADD_GATED:
            checked.place(each.x, "x");
            checked.holds(each.x.width == each.out.width, "width");
            checked.vector(each.norm, 1, "gate");
            break;
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
        case TW_ALL_REDUCE:
            checked.place(each.x, "x");
            checked.holds(each.x.width == each.out.width, "width");
            checked.holds(is_between(each.function, 0, TW_NUM_WIRES), "wire");
            break;
        case TW_GATHER_LOGITS:
            checked.place(each.x, "x");
            checked.holds(each.x.width <= each.out.width, "width");
            checked.holds(each.out.buffer == program.logits && each.x.buffer != program.logits && index + 1 == program.num_instructions, "its order");
            break;
        default: check_mixer(checked, each, routed);
    }
}

}  // namespace

void check_program(const TwProgram& program) {
    require(program.size == sizeof(TwProgram) && program.version == TW_VERSION &&
            program.instruction_size == sizeof(TwInstruction) && program.tensor_size == sizeof(TwTensor),
            "a program of another version");
    require(is_between(program.num_threads, 1, 4096), "threads");
    require(is_between(program.max_num_seqs, 1, 1 << 20) && is_between(program.max_context, 1, kMost), "slots or context");
    require(is_between(program.max_tokens, 1, 1 << 16), "tokens of a step");
    require(is_between(program.large_pages, 0, 3), "large pages");
    for (int32_t i = 0; i < program.num_buffers; i++) require(is_between(program.widths[i], 1, kMost), "width of a buffer");
    for (int32_t i = 0; i < program.num_states; i++) {
        const TwState& state = program.states[i];
        require(is_between(state.kind, 0, TW_NUM_STATE_KINDS) && is_between(state.num_heads, 1, 1 << 20) &&
                is_between(state.head_dim, state.kind != TW_WINDOW, 1 << 12) && is_between(state.mantissa_bits, 0, 8) &&
                is_between(state.cache, 0, TW_NUM_CACHES) && (state.cache != TW_CACHE_BFP8 || state.mantissa_bits == 7) &&
                (state.kind != TW_MATRIX || is_between(state.value_dim, 1, 1 << 12)), "state " + std::to_string(i));
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
    Routed routed;
    bool gathered = false;  // logits have exactly the gathered rows
    for (int32_t i = 0; i < program.num_instructions; i++) {
        const TwInstruction& each = program.instructions[i];
        check_instruction(program, i, routed);
        gathered = gathered || each.op == TW_GATHER;
        bool logits = false;
        for (const TwPlace* place : {&each.out, &each.x, &each.y, &each.z, &each.gate}) logits = logits || place->buffer == program.logits;
        const bool of_all = each.op == TW_ATTEND || each.op == TW_EMBED || each.op == TW_CONVOLVE || each.op == TW_DELTA_RULE ||
                            each.op == TW_CROSS_ATTEND || each.op == TW_ADD_GATED || each.op == TW_READ_HIDDEN;
        require(gathered ? !of_all : !logits, "instruction " + std::to_string(i) + ": its order");
        require(each.op != TW_GATHER || !logits, "rows are gathered into logits");
    }
}

}  // namespace tw
