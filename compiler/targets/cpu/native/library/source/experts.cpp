// Experts: select experts per token, sort tokens by expert, and read every expert's weights once
// for all its tokens.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "prepared.h"

namespace tw {
namespace {

constexpr int kMaxLocalSlots = 8;  // up to this size, every thread prepares its own rows
constexpr int kMaxSingleRouted = 2; // up to this size, a single thread routes

// Select a token's most probable experts. The first wins a tie. With biases, weights are sigmoids,
// and the biases count for the selection only.
void choose(Worker& worker, const TwInstruction& each, int64_t token) {
    Routing& routing = worker.engine.routing;
    float *likely = (float*)worker.scratch(), ranks[kMostChosen];
    const float *x = worker.at(each.x, token), *bias = each.bias >= 0 ? worker.vector(each.bias) : nullptr;
    if (!bias) worker.kernels().softmax(x, each.num_experts, likely);
    else for (int32_t expert = 0; expert < each.num_experts; expert++) likely[expert] = 1.0f / (1.0f + std::exp(-x[expert]));
    int32_t* experts = routing.experts.data() + token * each.top_k;
    float* weights = routing.weights.data() + token * each.top_k;
    for (int32_t expert = 0, num_selected = 0; expert < each.num_experts; expert++) {
        const float rank = bias ? likely[expert] + bias[expert] : likely[expert];
        if (num_selected == each.top_k && !(rank > ranks[num_selected - 1])) continue;
        int32_t at = num_selected < each.top_k ? num_selected++ : num_selected - 1;
        for (; at > 0 && rank > ranks[at - 1]; at--) {
            experts[at] = experts[at - 1];
            weights[at] = weights[at - 1];
            ranks[at] = ranks[at - 1];
        }
        experts[at] = expert;
        weights[at] = likely[expert];
        ranks[at] = rank;
    }
    if (each.flags & TW_RENORMALISE) {
        float sum = 0.0f;
        for (int32_t i = 0; i < each.top_k; i++) sum += weights[i];
        for (int32_t i = 0; i < each.top_k; i++) weights[i] /= sum;
    }
    if (bias) for (int32_t i = 0; i < each.top_k; i++) weights[i] *= each.scale;
}

void sort(Worker& worker, const TwInstruction& each) {
    Routing& routing = worker.engine.routing;
    const int64_t num_entries = worker.num_rows * each.top_k;
    routing.top_k = each.top_k;
    routing.num_chosen = 0;
    int32_t* firsts = routing.firsts.data();
    std::fill(firsts, firsts + each.num_experts + 1, 0);
    for (int64_t i = 0; i < num_entries; i++) firsts[routing.experts[i] + 1]++;
    for (int32_t expert = 0; expert < each.num_experts; expert++) firsts[expert + 1] += firsts[expert];
    for (int64_t i = 0; i < num_entries; i++) {
        int32_t slot = firsts[routing.experts[i]]++;  // ends at the next expert's start
        routing.entries[slot] = (int32_t)i;
        routing.slots[i] = slot;
    }
    int32_t begin = 0, count = 0;
    for (int32_t expert = 0; expert < each.num_experts; expert++) {
        int32_t end = firsts[expert];
        if (end == begin) continue;
        routing.chosen[count] = expert;
        firsts[count++] = begin;  // all later entries are already read
        begin = end;
    }
    firsts[count] = begin;
    routing.num_chosen = count;
}

// ExpertRows of an expert matmul: `own` has a row per entry, otherwise a row per token.
struct ExpertRows {
    int64_t num_tokens, num_slots, columns, padded;
    int32_t top_k;
    bool own, single;

    ExpertRows(const TwTensor& weight, const TwInstruction& each, int64_t num_tokens)
        : num_tokens(num_tokens), columns(weight.columns), padded(rounded(weight.columns, kBlock)), top_k(each.top_k) {
        own = each.x.width != columns;
        single = !own && num_tokens == 1;  // a common row for all experts
        num_slots = single ? 1 : num_tokens * top_k;
    }

    bool is_small() const { return num_slots <= kMaxLocalSlots; }
};

// Prepare rows in expert order.
void prepare_token(Worker& worker, const TwInstruction& each, const ExpertRows& rows, const Prepared& to, int32_t arithmetic, int64_t token) {
    const int32_t* slots = worker.engine.routing.slots.data() + token * rows.top_k;
    const float* x = worker.at(each.x, token);
    if (rows.single) return prepare(worker.kernels(), x, rows.columns, nullptr, 0.0f, false, to, arithmetic, 0, nullptr);
    prepare(worker.kernels(), x, rows.columns, nullptr, 0.0f, false, to, arithmetic, slots[0], nullptr);
    for (int32_t i = 1; i < rows.top_k; i++) {
        if (rows.own) {
            prepare(worker.kernels(), x + i * rows.columns, rows.columns, nullptr, 0.0f, false, to, arithmetic, slots[i], nullptr);
            continue;
        }
        std::memcpy(to.values + slots[i] * to.row_bytes, to.values + slots[0] * to.row_bytes, to.row_bytes);
        if (arithmetic != TW_AS_INT8) continue;
        std::memcpy(to.terms + slots[i] * to.num_blocks, to.terms + slots[0] * to.num_blocks, to.num_blocks * sizeof(BlockTerms));
    }
}

Operand rows_of(const Prepared& rows, int64_t slot) {
    return {rows.values + slot * rows.row_bytes, rows.row_bytes, rows.terms + slot * rows.num_blocks, rows.num_blocks};
}

// A thread's scratch: prepared rows, matmul scratch, row offsets, and results to weight.
struct ExpertScratch {
    uint8_t *rows, *product;
    int64_t* offsets;
    float* products;
    int64_t num_bytes;

    ExpertScratch(uint8_t* memory, const ExpertRows& each) {
        rows = memory;
        product = rows + rounded(kMaxLocalSlots * each.padded * 5 + 256, 64);
        offsets = (int64_t*)(product + each.padded * 128);
        products = (float*)(offsets + rounded(each.num_tokens, 8));
        num_bytes = (uint8_t*)(products + each.num_tokens * each.top_k * 2 * kLanes) - memory;
    }
};

// Matmuls for a group's tokens with a pair of its expert's panels.
struct Product {
    Worker& worker;
    const TwInstruction& each;
    const TwTensor& weight;
    const ExpertRows& rows;
    const Prepared& prepared;
    const ExpertScratch& scratch;
    int32_t arithmetic;
    int64_t num_pairs;

    // `offset_of(entry)`: offset of an entry's results in floats from result.first.
    template <class Offset> void make(int64_t group, int64_t pair, Result result, Offset offset_of) const {
        const Routing& routing = worker.engine.routing;
        const PanelSize size = panel_size(weight.kind, weight.columns);
        const int64_t begin = routing.firsts[group], count = routing.firsts[group + 1] - begin;
        const int64_t panel = (routing.chosen[group] * num_pairs + pair) * 2;
        const uint8_t* first = (const uint8_t*)weight.data + panel * size.total;
        const PanelPair panels{weight.kind, weight.columns, first, first + size.total, streams_of(first + 2 * size.total, 2 * size.total, weight.columns, 0, 1)};
        for (int64_t i = 0; i < count; i++) scratch.offsets[i] = offset_of(routing.entries[begin + i]);
        if (each.bias >= 0) result.bias = worker.vector(each.bias) + panel * kLanes;
        result.offsets = scratch.offsets;
        multiply(worker.kernels(), arithmetic, panels, rows_of(prepared, rows.single ? 0 : begin), count, result, scratch.product);
    }
};

Result result_of(const TwInstruction& each, float* out, int64_t pair, int64_t width) {
    Result result{};
    result.swiglu = each.flags & TW_PAIRED;
    result.rounds = each.flags & TW_ROUNDED;
    result.limit = each.soft_cap;
    result.alpha = each.factor;
    const int64_t first = result.swiglu ? pair * kLanes : pair * 2 * kLanes;
    result.first = out;
    result.second = out + kLanes;
    result.num_first = lanes_left(width, first);
    result.num_second = result.swiglu ? 0 : lanes_left(width, first + kLanes);
    return result;
}

// Compute all entries' matmuls, adjacent in their token's row.
void share_products(Worker& worker, const Product& product) {
    const TwInstruction& each = product.each;
    const int64_t width = each.out.width / each.top_k, stride = worker.stride(each.out);
    worker.share(worker.engine.routing.num_chosen * product.num_pairs, [&](int64_t i) {
        const int64_t pair = i % product.num_pairs, lanes = each.flags & TW_PAIRED ? kLanes : 2 * kLanes;
        Result result = result_of(each, worker.at(each.out, 0) + pair * lanes, pair, width);
        product.make(i / product.num_pairs, pair, result, [&](int64_t entry) {
            return entry / each.top_k * stride + entry % each.top_k * width;
        });
    });
}

// Compute each token's weighted sum, 32 columns at a time.
void share_sums(Worker& worker, const Product& product) {
    const TwInstruction& each = product.each;
    const Routing& routing = worker.engine.routing;
    float* products = product.scratch.products;
    worker.share(product.num_pairs, [&](int64_t pair) {
        const int64_t first = pair * 2 * kLanes, count = std::min<int64_t>(2 * kLanes, each.out.width - first);
        Result result = result_of(each, products, pair, each.out.width);
        for (int32_t group = 0; group < routing.num_chosen; group++)
            product.make(group, pair, result, [](int64_t entry) { return entry * 2 * kLanes; });
        for (int64_t token = 0; token < worker.num_rows; token++) {
            float sum[2 * kLanes];
            worker.kernels().weigh(products + token * each.top_k * 2 * kLanes, routing.weights.data() + token * each.top_k, each.top_k, 2 * kLanes, count, sum);
            float* out = worker.at(each.out, token) + first;
            if (each.y.buffer >= 0) {
                float shared[2 * kLanes];
                worker.kernels().sigmoid_gate(worker.at(each.y, token) + first, worker.at(each.gate, token), count, true, shared);
                for (int64_t i = 0; i < count; i++) sum[i] += shared[i];
            }
            if (each.flags & TW_ROUNDED) worker.kernels().round_bf16(sum, count);
            for (int64_t i = 0; i < count; i++) out[i] = each.flags & TW_RESIDUAL ? out[i] + sum[i] : sum[i];
            if (each.flags & TW_ROUNDED) worker.kernels().round_bf16(out, count);
        }
    });
}

}  // namespace

int64_t experts_scratch(const TwTensor& weight, const TwInstruction& each, int64_t num_tokens) {
    return ExpertScratch(kNowhere, ExpertRows(weight, each, num_tokens)).num_bytes;
}

int64_t experts_operand(const TwTensor& weight, const TwInstruction& each, int64_t num_tokens) {
    return ExpertRows(weight, each, num_tokens).padded * 5 * num_tokens * each.top_k + 4096;
}

void run_route(Worker& worker, const TwInstruction& each) {
    if (worker.num_rows > kMaxSingleRouted) {
        worker.share(worker.num_rows, [&](int64_t token) { choose(worker, each, token); });
        worker.meet();
        worker.share(1, [&](int64_t) { sort(worker, each); });
        return;
    }
    worker.share(1, [&](int64_t) {
        for (int64_t token = 0; token < worker.num_rows; token++) choose(worker, each, token);
        sort(worker, each);
    });
}

void run_experts(Worker& worker, const TwInstruction& each) {
    const TwTensor& weight = worker.engine.tensors[each.weight];
    const int32_t arithmetic = each.arithmetic[worker.step.decodes ? 1 : 0];
    const ExpertRows rows(weight, each, worker.num_rows);
    const ExpertScratch scratch(worker.scratch(), rows);
    const Prepared prepared(worker.kernels(), rows.is_small() ? scratch.rows : worker.engine.operand.data(), rows.num_slots, rows.padded, arithmetic, weight.kind, false);
    auto prepare = [&](int64_t token) { prepare_token(worker, each, rows, prepared, arithmetic, token); };
    if (rows.is_small()) {
        for (int64_t token = 0; token < rows.num_tokens; token++) prepare(token);
    } else {
        worker.share(rows.num_tokens, prepare);
        worker.meet();
    }
    const int64_t num_pairs = num_panels(weight.rows / each.num_experts, each.flags & TW_PAIRED) / 2;
    const Product product{worker, each, weight, rows, prepared, scratch, arithmetic, num_pairs};
    if (each.op == TW_EXPERTS) share_products(worker, product);
    else share_sums(worker, product);
}

}  // namespace tw
