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

constexpr int64_t kRegionBytes = 40960;  // streams on several pages; 64 KB is slower
constexpr int64_t kMaxPanelBytes = 1 << 18;  // a pair of larger panels would fill the second cache
constexpr int64_t kNearBytes = 16384;  // prefetch distance in larger panels

// Consecutive pairs of panels.
struct Region {
    int64_t begin, end;
};

// A thread's own panels in a matmul, in nearly equal regions. During a region, the thread prefetches
// the next region.
struct Panels {
    PanelSize size;
    int64_t num_pairs, num_regions;
    Region own;
    const uint8_t* data;

    Panels(const Worker& worker, const TwInstruction& each) {
        const TwTensor& weight = worker.engine.tensors[each.weight];
        size = panel_size(weight.kind, weight.columns);
        num_pairs = num_panels(weight.rows, each.flags & TW_PAIRED) / 2;
        own = {worker.first_of(worker.thread, num_pairs), worker.first_of(worker.thread + 1, num_pairs)};
        const int64_t max_pairs = (kRegionBytes + 2 * size.total - 1) / (2 * size.total);
        num_regions = (own.end - own.begin + max_pairs - 1) / max_pairs;
        data = (const uint8_t*)weight.data;
    }
    const uint8_t* pair(int64_t index) const { return data + index * 2 * size.total; }

    Region region_at(int64_t index) const {
        const int64_t count = own.end - own.begin;
        if (!count) return own;
        const int64_t which = ((index - own.begin + 1) * num_regions - 1) / count;
        return {own.begin + which * count / num_regions, own.begin + (which + 1) * count / num_regions};
    }
};

// Prefetch a part of the next region during a thread's own pair. The next matmul's first region
// follows the last region. If a pair would fill that cache, prefetch nearby columns in both panels.
// Smaller pairs from other threads prefetch nothing, because their threads prefetch the next region.
Ahead ahead_of(int32_t columns, const Panels& panels, const Panels& next, int64_t index) {
    if (panels.size.total > kMaxPanelBytes)
        return {panels.pair(index) + kNearBytes, 2, panels.size.total, panels.size.total, bytes_per_block(panels.size.total, columns)};
    if (index < panels.own.begin || index >= panels.own.end) return {};
    const Region region = panels.region_at(index);
    const bool is_last = region.end == panels.own.end;
    const Panels& source = is_last ? next : panels;
    const Region following = source.region_at(is_last ? next.own.begin : region.end);
    const int64_t num_bytes = (following.end - following.begin) * 2 * source.size.total;
    const uint8_t* data = source.pair(following.begin);
    if (source.size.total > kMaxPanelBytes) {
        if (!num_bytes || index + 1 < region.end) return {};
        return {data, 2, source.size.total, kNearBytes, bytes_per_block(kNearBytes, columns)};
    }
    return streams_of(data, num_bytes, columns, index - region.begin, region.end - region.begin);
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
    const Panels panels(worker, each), next(worker, following);
    worker.share_evenly(panels.num_pairs, [&](int64_t pair) {
        const uint8_t* first = panels.pair(pair);
        const PanelPair both{weight.kind, weight.columns, first, first + panels.size.total, ahead_of(weight.columns, panels, next, pair)};
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
