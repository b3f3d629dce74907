// Runs a step: all threads execute the instructions together.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "executor.h"

namespace tw {
namespace {

void run_embed(Worker& worker, const TwInstruction& each) {
    const TwTensor& table = worker.engine.tensors[each.weight];
    const PanelSize size = panel_size(table.kind, table.columns);
    worker.share(worker.num_rows, [&](int64_t row) {
        int64_t token = worker.step.tokens[row];
        if (worker.step.image_rows && worker.step.image_rows[row] >= 0) {
            const float* from = worker.step.embeddings + worker.step.image_rows[row] * (int64_t)each.out.width;
            std::memcpy(worker.at(each.out, row), from, each.out.width * 4);
            if (each.flags & TW_ROUNDED) worker.kernels().round_bf16(worker.at(each.out, row), each.out.width);
            return;
        }
        const uint8_t* panel = (const uint8_t*)table.data + token / kLanes * size.total;
        const float* values = (const float*)panel;
        if (table.kind != TW_FP32) {
            worker.kernels().to_fp32(table.kind, panel, table.columns, (float*)worker.scratch());
            values = (const float*)worker.scratch();
        }
        float* out = worker.at(each.out, row);
        for (int64_t k = 0; k < each.out.width; k++) out[k] = values[k * kLanes + token % kLanes];
        if (each.flags & TW_ROUNDED) worker.kernels().round_bf16(out, each.out.width);
    });
}

void read_hidden(Worker& worker, const TwInstruction& each) {
    const int64_t width = each.out.width;
    worker.share(worker.num_rows, [&](int64_t row) {
        std::memcpy(worker.at(each.out, row), worker.step.carried + row * width, width * 4);
        if (each.flags & TW_ROUNDED) worker.kernels().round_bf16(worker.at(each.out, row), width);
    });
}

void norm_heads(Worker& worker, const TwInstruction& each, int64_t row) {
    const int64_t dim = worker.engine.tensors[each.norm].rows, num_parts = each.x.width / dim;
    const int64_t num_keys = (num_parts - each.num_heads) / 2;
    const float* x = worker.at(each.x, row);
    float* out = worker.at(each.out, row);
    for (int64_t head = 0; head < num_parts; head++) {
        if (head >= each.num_heads + num_keys) {
            if (out != x) std::memcpy(out + head * dim, x + head * dim, dim * 4);
            continue;
        }
        const float* weight = worker.vector(head < each.num_heads ? each.norm : each.other);
        worker.kernels().norm(x + head * dim, weight, each.eps, dim, out + head * dim);
    }
}

void run_rows(Worker& worker, const TwInstruction& each) {
    const Kernels& kernels = worker.kernels();
    const int64_t width = each.out.width;
    worker.share(worker.num_rows, [&](int64_t row) {
        float* out = worker.at(each.out, row);
        const float* x = worker.at(each.x, each.op == TW_GATHER && !worker.has_selected ? worker.step.rows[row] : row);
        const float* y = each.y.buffer >= 0 ? worker.at(each.y, row) : nullptr;
        switch (each.op) {
            case TW_GATHER: std::memcpy(out, x, width * 4); break;
            case TW_SWIGLU: kernels.swiglu(x, y, width, out); break;
            case TW_SIGMOID_GATE: kernels.sigmoid_gate(x, y, width, each.y.width == 1 && width != 1, out); break;
            case TW_NORM: kernels.norm(x, worker.vector(each.norm), each.eps, width, out); break;
            case TW_NORM_HEADS: norm_heads(worker, each, row); break;
            case TW_ADD_GATED:
                if (worker.step.visible[2 * row] < worker.step.visible[2 * row + 1])
                    kernels.blend(1.0f, std::tanh(*worker.vector(each.norm)), x, width, out);
                break;
            default: kernels.function(each.function, x, y, each.number, width, out);
        }
        if (each.flags & TW_ROUNDED) kernels.round_bf16(out, width);
    });
}

// Move the rows for logits to the beginning. Ascending rows are not overwritten before they move.
void select_rows(Worker& worker) {
    const TwStep& step = worker.step;
    if (worker.thread == 0)
        for (int32_t buffer : worker.engine.tail_buffers) {
            const int64_t width = worker.engine.widths[buffer];
            float* rows = (float*)worker.engine.buffers[buffer].data();
            for (int32_t row = 0; row < step.num_rows; row++) std::memmove(rows + row * width, rows + step.rows[row] * width, width * 4);
        }
    worker.num_rows = step.num_rows;
    worker.has_selected = true;
    worker.meet();
}

void add_time(int64_t& to, std::chrono::steady_clock::time_point& since) {
    const auto now = std::chrono::steady_clock::now();
    to += std::chrono::duration_cast<std::chrono::nanoseconds>(now - since).count();
    since = now;
}

struct Context {
    Engine& engine;
    const TwStep& step;
    uint32_t turns;
};

void run_step(void* given, int thread) {
    Context& context = *(Context*)given;
    Engine& engine = context.engine;
    const TwStep& step = context.step;
    Worker worker{engine, step, thread, step.num_tokens, engine.turns};
    auto since = std::chrono::steady_clock::now();
    make_angles(worker);
    for (size_t i = 0; i < engine.instructions.size(); i++) {
        const TwInstruction& each = engine.instructions[i];
        if ((each.op == TW_CROSS_ATTEND || each.op == TW_ADD_GATED || each.flags & TW_CROSS) && !step.visible) continue;
        if (step.hidden && step.logits && each.op == TW_GATHER) write_hidden(worker, engine.instructions[engine.head], each.x);
        if (each.op == TW_GATHER) worker.num_rows = step.num_rows;
        if (!worker.num_rows) break;
        if (step.hidden && !step.logits && (int32_t)i == engine.head) {
            write_hidden(worker, each, each.x);
            break;
        }
        switch (each.op) {
            case TW_EMBED: run_embed(worker, each); break;
            case TW_READ_HIDDEN: read_hidden(worker, each); break;
            case TW_LINEAR: run_linear(worker, each, engine.instructions[engine.next_products[i]]); break;
            case TW_ATTEND: run_attend(worker, each, (int32_t)i); break;
            case TW_ROUTE: run_route(worker, each); break;
            case TW_EXPERTS: case TW_EXPERT_SUM: run_experts(worker, each); break;
            case TW_CONVOLVE: run_convolve(worker, each); break;
            case TW_DELTA_RULE: run_delta_rule(worker, each); break;
            case TW_CROSS_ATTEND: run_cross_attend(worker, each); break;
            case TW_ALL_REDUCE: run_all_reduce(worker, each); break;
            case TW_GATHER_LOGITS: run_gather_logits(worker, each); break;
            default: run_rows(worker, each);
        }
        if (i + 1 < engine.instructions.size()) worker.meet();
        if ((int32_t)i == engine.tail && selects_rows(step)) select_rows(worker);
        if (engine.times && thread == 0) add_time(engine.times[i], since);
    }
    if (thread == 0) context.turns = worker.turns;
}

// Return whether another rank gets the step's logits, or rank 0 gets only the best.
bool has_others(const Engine& engine, const TwStep& step) { return engine.exchange && (engine.exchange->rank || step.best); }

// Return whether a slot still has all visible positions. A new sequence has none.
bool is_retained(const Engine& engine, int32_t slot, int32_t position) {
    for (const CacheGroup& each : engine.groups)
        if (position && std::max(position + 1 - each.window, 0) < each.given_back[slot]) return false;
    return true;
}

bool fits(const Engine& engine, const TwStep& step) {
    const TwProgram& program = engine.program;
    if (step.num_tokens < 1 || step.num_tokens > program.max_tokens || step.num_sequences < 1) return false;
    const bool is_written = step.hidden ? engine.head >= 0 : step.logits || has_others(engine, step);
    if (step.num_rows < 0 || step.num_rows > step.num_tokens || (step.num_rows && !is_written)) return false;
    if (step.bounds[0] != 0 || step.bounds[step.num_sequences] != step.num_tokens) return false;
    for (int32_t i = 0; i < step.num_sequences; i++) {
        if (step.slots[i] < 0 || step.slots[i] >= program.max_num_seqs || step.bounds[i] >= step.bounds[i + 1]) return false;
        for (int32_t t = step.bounds[i] + 1; t < step.bounds[i + 1]; t++)
            if (step.positions[t] != step.positions[t - 1] + 1) return false;
    }
    for (int32_t i = 0; step.ends && i < step.num_sequences; i++)
        for (int32_t t = step.bounds[i], last = 0; t < step.bounds[i + 1]; last = step.ends[t++])
            if (step.ends[t] <= step.positions[t] || step.ends[t] < last || step.ends[t] > step.positions[step.bounds[i + 1] - 1] + 1) return false;
    if (engine.needs_peers && !engine.exchange) return false;
    if (engine.reads_hidden && !step.carried) return false;
    const bool has_norm = engine.head >= 0 && (engine.gathers_normed || engine.instructions[engine.head].norm >= 0);
    if (step.hidden && step.logits && !has_norm) return false;
    if (step.visible && step.cross_width != engine.cross_width) return false;
    if (step.visible && step.cross_bits != 16 && step.cross_bits != 32) return false;
    for (int32_t i = 0; step.visible && i < step.num_tokens; i++)
        if (step.visible[2 * i] < 0 || step.visible[2 * i] > step.visible[2 * i + 1] || step.visible[2 * i + 1] > step.num_images) return false;
    const int32_t table = engine.instructions[0].op == TW_EMBED ? engine.tensors[engine.instructions[0].weight].rows : 0;
    for (int32_t i = 0; i < step.num_tokens; i++)
        if (step.tokens[i] < 0 || step.tokens[i] >= table || step.positions[i] < 0 || step.positions[i] >= program.max_context) return false;
    for (int32_t i = 0; i < step.num_sequences; i++)
        if (!is_retained(engine, step.slots[i], step.positions[step.bounds[i]])) return false;
    for (int32_t i = 0; i < step.num_rows; i++)
        if (step.rows[i] < 0 || step.rows[i] >= step.num_tokens) return false;
    return true;
}

void forget_given_back(Engine& engine, int32_t slot) {
    for (CacheGroup& each : engine.groups) each.given_back[slot] = 0;
}

}  // namespace

bool selects_rows(const TwStep& step) {
    for (int32_t i = 1; i < step.num_rows; i++)
        if (step.rows[i] <= step.rows[i - 1]) return false;
    return !step.hidden && step.num_rows < step.num_tokens;
}

void give_back(Engine& engine, int32_t slot, int32_t end) {
    const int64_t page = engine.program.large_pages ? 2 << 20 : 4096, least = std::max<int64_t>(page, 1 << 16);
    for (CacheGroup& each : engine.groups) {
        if (!each.window || end - kReachBack <= each.window) continue;
        const int32_t last = (end - kReachBack - each.window) / kPositions * kPositions;
        const int64_t base = (int64_t)engine.cache.data() + slot * engine.slot_bytes + each.offset;
        const int64_t begin = std::max(rounded(base, page), (base + each.given_back[slot] / kPositions * each.step) / page * page);
        const int64_t behind = (base + last / kPositions * each.step) / page * page;
        if (behind - begin < least) continue;
        engine.cache.release(begin - (int64_t)engine.cache.data(), behind - begin);
        each.given_back[slot] = last;
    }
}

}  // namespace tw

using tw::Engine;

extern "C" {

int32_t tw_step(void* engine, const TwStep* step) {
    Engine& own = *(Engine*)engine;
    if (!tw::fits(own, *step)) return 1;
    for (int32_t i = 0; i < step->num_sequences; i++)
        if (!step->positions[step->bounds[i]]) tw::forget_given_back(own, step->slots[i]);
    for (auto& each : own.counters) each.store(0, std::memory_order_relaxed);
    tw::Context context{own, *step, 0};
    own.pool->run(tw::run_step, &context);
    own.turns = context.turns;
    for (int32_t i = 0; i < step->num_sequences; i++) tw::give_back(own, step->slots[i], step->positions[step->bounds[i + 1] - 1] + 1);
    return own.exchange && own.exchange->failed >= 0 ? 2 : 0;
}

void tw_keep_rows(void* engine, void* states) { ((Engine*)engine)->row_states = (uint8_t*)states; }

void tw_times(void* engine, int64_t* times) { ((Engine*)engine)->times = times; }

void tw_clear(void* engine, int32_t slot) {
    Engine& own = *(Engine*)engine;
    if (own.slot_bytes) own.cache.release(slot * own.slot_bytes, own.slot_bytes);
    tw::forget_given_back(own, slot);
    if (own.kept_bytes) own.kept.release(slot * own.kept_bytes, own.kept_bytes);
}

void tw_copy(void* engine, int32_t source, int32_t target, int32_t num_positions) {
    Engine& own = *(Engine*)engine;
    for (tw::CacheGroup& each : own.groups) {
        const int64_t first = each.given_back[source] / tw::kPositions * each.step;
        const int64_t end = tw::rounded(num_positions, tw::kPositions) / tw::kPositions * each.step;
        each.given_back[target] = num_positions ? each.given_back[source] : 0;
        if (first >= end) continue;
        uint8_t* to = own.cache.data() + each.offset + first;
        std::memcpy(to + target * own.slot_bytes, to + source * own.slot_bytes, end - first);
    }
    if (own.kept_bytes) tw_load(engine, target, own.kept.data() + source * own.kept_bytes);
}

int64_t tw_slot_bytes(void* engine, int32_t num_positions) {
    int64_t found = 0;
    for (const tw::CacheGroup& each : ((Engine*)engine)->groups) {
        const int64_t most = each.window ? each.window + (int64_t)tw::kReachBack : num_positions;
        found += each.step / tw::kPositions * std::min<int64_t>(num_positions, most);
    }
    return found;
}

int64_t tw_sequence_bytes(void* engine) { return ((Engine*)engine)->kept_bytes; }

void tw_save(void* engine, int32_t slot, void* to) {
    Engine& own = *(Engine*)engine;
    std::memcpy(to, own.kept.data() + slot * own.kept_bytes, own.kept_bytes);
}

void tw_load(void* engine, int32_t slot, const void* from) {
    Engine& own = *(Engine*)engine;
    std::memcpy(own.kept.data() + slot * own.kept_bytes, from, own.kept_bytes);
}

}
