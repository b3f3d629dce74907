// Matmul rows, prepared once for all panels.
#pragma once

#include <algorithm>
#include <cstring>

#include "executor.h"

namespace tw {

// Layout of a matmul's prepared rows in memory.
struct Prepared {
    uint8_t* values;
    BlockTerms* terms;
    int64_t row_bytes, num_blocks, num_rows;
    int32_t kind;    // the weight's
    bool is_signed;  // all rows are multiplied together, by 8-bit codes

    Prepared(const Kernels& kernels, uint8_t* memory, int64_t num_rows, int64_t padded, int32_t arithmetic, int32_t kind, bool is_whole) {
        int64_t widths[] = {4, kernels.bf16_bytes, has_byte_codes(kind) ? kernels.byte_words : 1};
        row_bytes = padded * widths[arithmetic];
        num_blocks = padded / kBlock;
        this->num_rows = num_rows;
        this->kind = kind;
        is_signed = is_whole && arithmetic == TW_AS_INT8 && has_byte_codes(kind) && kernels.signed_rows && num_rows >= kernels.signed_rows;
        values = memory;
        terms = (BlockTerms*)(memory + rounded(num_rows * row_bytes, 64));
    }
};

// Prepare row `row` of a matmul: normalize it into `normed` if there is a `norm`, then convert it for
// the arithmetic. `rounds`: round the normalized row to bfloat16 first.
inline void prepare(const Kernels& kernels, const float* x, int64_t width, const float* norm, float eps, bool rounds, const Prepared& to, int32_t arithmetic, int64_t row, float* normed) {
    const int64_t padded = to.num_blocks * kBlock;
    if (norm) {
        kernels.norm(x, norm, eps, width, normed);
        if (rounds) kernels.round_bf16(normed, width);
        x = normed;
    }
    if (to.is_signed) return kernels.quantise_signed(x, width, to.kind, to.values, row, to.num_rows);
    uint8_t* values = to.values + row * to.row_bytes;
    if (arithmetic == TW_AS_INT8) {
        kernels.quantise(x, width, to.kind, values, to.terms + row * to.num_blocks);
    } else if (arithmetic == TW_AS_BF16 && kernels.bf16_bytes == 2) {
        kernels.to_bf16(x, width, (uint16_t*)values);
    } else {
        float* out = (float*)values;
        std::memcpy(out, x, width * 4);
        std::fill(out + width, out + padded, 0.0f);
        if (arithmetic == TW_AS_BF16) kernels.round_bf16(out, padded);
    }
}

inline void multiply(const Kernels& kernels, int32_t arithmetic, const PanelPair& panels, const Operand& x, int64_t num_rows, const Result& result, void* scratch) {
    if (arithmetic == TW_AS_INT8) kernels.product_int8(panels, x, num_rows, result);
    else if (arithmetic == TW_AS_BF16) kernels.product_bf16(panels, x, num_rows, result, scratch);
    else kernels.product_fp32(panels, x, num_rows, result, scratch);
}

inline int64_t bytes_per_block(int64_t num_bytes, int64_t columns) {
    const int64_t num_blocks = rounded(columns, kBlock) / kBlock;
    return (num_bytes + num_blocks - 1) / num_blocks;
}

// Prefetch part `part` of `num_parts` of a region during a multiplication with `columns`. On Zen 3,
// four streams are faster than a single stream, probably by hardware prefetching in each page.
inline Ahead streams_of(const uint8_t* region, int64_t num_bytes, int64_t columns, int64_t part, int64_t num_parts) {
    constexpr int64_t kStreams = 4;
    const int64_t stride = rounded(num_bytes, 64 * kStreams) / kStreams;
    const int64_t part_bytes = rounded(stride, 64 * num_parts) / num_parts, first = part * part_bytes;
    return {region + first, kStreams, stride, std::min(part_bytes, stride - first), bytes_per_block(part_bytes, columns)};
}

inline int lanes_left(int64_t width, int64_t first) {
    int64_t left = width - first;
    return (int)(left < 0 ? 0 : left < kLanes ? left : kLanes);
}

}  // namespace tw
