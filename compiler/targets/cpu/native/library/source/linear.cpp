// Matmuls: rows are normalized and prepared once, then threads share the pairs of panels.

#include <cstring>

#include "prepared.h"

namespace tw {
namespace {

constexpr int kMaxLocalRows = 4;  // up to this size, every thread prepares its own rows

Result result_of(Worker& worker, const TwInstruction& each, int64_t pair) {
    const bool swiglu = each.flags & TW_PAIRED;
    const int64_t first = swiglu ? pair * kLanes : pair * 2 * kLanes;
    Result result{};
    float* out = worker.at(each.out, 0);
    result.first = out + first;
    result.second = out + first + kLanes;
    result.stride = worker.stride(each.out);
    result.num_first = lanes_left(each.out.width, first);
    result.num_second = swiglu ? 0 : lanes_left(each.out.width, first + kLanes);
    result.bias = each.bias >= 0 ? worker.vector(each.bias) + pair * 2 * kLanes : nullptr;
    result.adds = each.flags & TW_RESIDUAL;
    result.swiglu = swiglu;
    result.rounds = each.flags & TW_ROUNDED;
    return result;
}

constexpr int64_t kMostAhead = 1 << 18, kNear = 16384;

// Start of a thread's own panels in a matmul.
struct Panels {
    PanelSize size;
    int64_t num_pairs;
    const uint8_t* data;

    Panels(const Engine& engine, const TwInstruction& each) {
        const TwTensor& weight = engine.tensors[each.weight];
        size = panel_size(weight.kind, weight.columns);
        num_pairs = num_panels(weight.rows, each.flags & TW_PAIRED) / 2;
        data = (const uint8_t*)weight.data;
    }
    const uint8_t* pair(int64_t index) const { return data + index * 2 * size.total; }
};

// Panels to prefetch during a multiplication: the thread's next pair, or after its last pair the
// first pair of the next matmul. If a pair would fill that cache, prefetch nearby columns of both
// panels.
PanelPair pair_of(Worker& worker, const TwTensor& weight, const Panels& panels, const Panels& next, int64_t index, bool is_last) {
    const uint8_t* first = panels.pair(index);
    PanelPair pair{weight.kind, weight.columns, first, first + panels.size.total, {}};
    if (panels.size.total > kMostAhead) {
        pair.ahead[0] = pair.first + kNear;
        pair.ahead[1] = pair.second + kNear;
    } else {
        const Panels& whose = is_last ? next : panels;
        pair.ahead[0] = whose.pair(is_last ? worker.first_of(worker.thread, next.num_pairs) : index + 1);
    }
    return pair;
}

}  // namespace

void run_linear(Worker& worker, const TwInstruction& each, const TwInstruction& following) {
    const Kernels& kernels = worker.kernels();
    const TwTensor& weight = worker.engine.tensors[each.weight];
    const int32_t arithmetic = each.arithmetic[worker.step.decodes ? 1 : 0];
    const int64_t padded = rounded(weight.columns, kBlock), num_rows = worker.num_rows;
    const bool is_small = num_rows <= kMaxLocalRows;
    // scratch: prepared rows, a normalized row, then the matmul's scratch
    uint8_t* own = worker.scratch();
    uint8_t* normed = own + rounded(kMaxLocalRows * padded * 4, 64) + rounded(kMaxLocalRows * padded, 64);
    uint8_t* scratch = normed + rounded(padded * 4, 64);
    Prepared rows(kernels, is_small ? own : worker.engine.operand.data(), num_rows, padded, arithmetic, weight.kind, true);
    const float* norm = each.norm >= 0 ? worker.vector(each.norm) : nullptr;
    auto make = [&](int64_t row) {
        prepare(kernels, worker.at(each.x, row), each.x.width, norm, each.eps, each.flags & TW_NORM_ROUNDED, rows, arithmetic, row, (float*)normed);
    };
    if (is_small) {
        for (int64_t row = 0; row < num_rows; row++) make(row);
    } else {
        worker.share(num_rows, make);
        worker.meet();
    }
    const Operand x{rows.values, rows.row_bytes, rows.terms, rows.num_blocks, rows.is_signed};
    const Panels panels(worker.engine, each), next(worker.engine, following);
    worker.share_evenly(panels.num_pairs, [&](int64_t pair, bool is_last) {
        const PanelPair both = pair_of(worker, weight, panels, next, pair, is_last);
        multiply(kernels, arithmetic, both, x, num_rows, result_of(worker, each, pair), scratch);
    });
}

// Write rows to the caller, normalized as the output layer's input.
void write_hidden(Worker& worker, const TwInstruction& head, const TwPlace& from) {
    const int64_t width = from.width;
    worker.share(worker.num_rows, [&](int64_t row) {
        const float* x = worker.at(from, row);
        float* out = worker.step.hidden + row * width;
        if (head.norm < 0) {
            std::memcpy(out, x, width * 4);
            return;
        }
        worker.kernels().norm(x, worker.vector(head.norm), head.eps, width, out);
        if (head.flags & TW_NORM_ROUNDED) worker.kernels().round_bf16(out, width);
    });
}

}  // namespace tw
