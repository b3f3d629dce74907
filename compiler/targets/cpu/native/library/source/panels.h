// Memory layout of weights: an even panel count with 16 rows (outputs) each.
//
// A panel begins with codes. Block formats end with scales, panel by panel. Zeros pad columns to whole
// blocks of 32. A paired weight alternates gate panels and up panels.
//
// Codes:
// - FP32: `[columns][16]` float.
// - BF16: `[columns / 2][16][2]` bfloat16. Two neighbors in a row are a pair.
// - FP16: `[columns][16]` float16.
// - 8-bit codes: `[columns / 4][16][4]` uint8, `code + 128`.
// - 4-bit codes: `[columns / 8][16][4]` uint8. The first four of 8 columns are in the low nibbles, the
//   next four in the high nibbles.
// - 5-bit codes: per block, 4 bits as above, then a fifth bit per column in `[16]` words. Bit
//   `8 * j + i` of a row's word is for column `4 * i + j`.
// - 6-bit codes: per block, 4 bits as above, then two bits per column in `[2][16]` words with 16 columns
//   each. Bits from `8 * j + 2 * i` are for column `4 * i + j`.
//
// Codes are unsigned. Either `zero_of` is the code for 0, or a block minimum is added.
//
// Scales, with `S = columns / 32` and `T = columns / 256`, rounded up:
// - Q80, Q40, Q50: `[S][16]` float16. Q41 and Q51 then have the same minimum count.
// - BFP8, BFP4: `[columns / 16][16]` uint8 exponents e. The scale is `2 ** (e - 127)`, or 0 for e = 0.
// - Q6_K: `[T][16]` float16, then `[columns / 16][16]` int8. A scale is their product.
// - Q4_K, Q5_K: `[T][2][16]` float16 for scales and minimums. Two blocks then share `[3][16]` uint8:
//   the first scale with 2 low bits of its minimum, the same for the second, and the high 4 bits of
//   both minimums.
// - IQ4_XS: `[T][16]` float16, then `[S][16]` int8. Codes are indices of uneven values.
// - FP8: `[columns / 128][16]` float, rounded up. Codes are bytes in e4m3, without a zero.
// - NF4: `[columns / 64][16]` float, rounded up. Codes index float values.
// - NVFP4: `[columns / 16][16]` float, half of the scales. Codes are indices of doubled e2m1 values.
//
// kPacked is an engine's compressed BF16 copy. It has equal values in 12 bits:
// - A header of 64 bytes: the number of exceptions (uint32), and from byte `16` the 16 most frequent upper
//   bytes.
// - `[columns / 8][3][64]` uint8: the lower bytes for two pairs and two pairs, then 4-bit indices of
//   upper bytes with the first two pairs in the low nibbles. For two pairs, every 16 bytes alternate 8
//   bytes from the first pair and 8 bytes from the second.
// - `[columns / 4]` exceptions in column order, for values with another upper byte.
#pragma once

#include "interface.h"

namespace tw {

constexpr int64_t kMaxCrossHead = 512;  // channels of a cross-attention head

constexpr int kLanes = 16;
constexpr int kBlock = 32;
constexpr int kSuper = 256;

constexpr int64_t rounded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

constexpr bool in_blocks(int kind) { return kind >= TW_Q80 && kind < TW_VECTOR; }

constexpr int code_bits(int kind) {
    switch (kind) {
        case TW_Q80: case TW_BFP8: case TW_FP8: return 8;
        case TW_Q6_K: return 6;
        case TW_Q50: case TW_Q51: case TW_Q5_K: return 5;
        default: return 4;
    }
}

constexpr bool has_minimums(int kind) {
    return kind == TW_Q41 || kind == TW_Q51 || kind == TW_Q4_K || kind == TW_Q5_K;
}

// Codes are indices of 16 values in 8 bits.
constexpr bool has_codebook(int kind) { return kind == TW_IQ4_XS || kind == TW_NVFP4; }

// Values have 8 bits.
constexpr bool has_byte_codes(int kind) { return code_bits(kind) == 8 || has_codebook(kind); }

// Codes are floats: products have no integer form.
constexpr bool has_float_codes(int kind) { return kind == TW_FP8 || kind == TW_NF4; }

// Supported arithmetic. NF4 values are only exact in float.
constexpr bool has_arithmetic(int kind, int arithmetic) {
    if (arithmetic == TW_AS_FP32) return true;
    if (has_float_codes(kind)) return kind == TW_FP8 && arithmetic == TW_AS_BF16;
    if (arithmetic == TW_AS_BF16 && kind == TW_BF16) return true;
    return in_blocks(kind) && !(has_minimums(kind) && arithmetic == TW_AS_BF16);
}

constexpr int zero_of(int kind) { return has_minimums(kind) || has_float_codes(kind) ? 0 : has_codebook(kind) ? 128 : 1 << (code_bits(kind) - 1); }

// Columns per scale.
constexpr int scale_length(int kind) {
    if (kind == TW_FP8) return 128;
    if (kind == TW_NF4) return 64;
    return kind == TW_BFP8 || kind == TW_BFP4 || kind == TW_Q6_K || kind == TW_NVFP4 ? 16 : 32;
}

constexpr int64_t scale_bytes(int kind, int64_t padded) {
    const int64_t supers = rounded(padded, kSuper) / kSuper;
    switch (kind) {
        case TW_Q4_K: case TW_Q5_K: return supers * 64 + rounded(padded, 64) / 64 * 48;
        case TW_Q6_K: return supers * 32 + padded;
        case TW_IQ4_XS: return supers * 32 + padded / 2;
        case TW_Q41: case TW_Q51: return padded * 2;
        case TW_FP8: return rounded(padded, 128) / 128 * 64;
        case TW_NF4: return rounded(padded, 64);
        case TW_NVFP4: return padded * 4;
        default: return padded;
    }
}

// Engine-internal kind, invalid in a program.
constexpr int kPacked = TW_NUM_KINDS;
constexpr int64_t kPackedHead = 64, kPackedTable = 16, kPackedGroup = 192, kPackedBlock = 4 * kPackedGroup;

// A value in a packed panel, at `index` in [columns / 2][16][2].
struct Exception {
    uint32_t index, value;
};

constexpr int64_t most_exceptions(int64_t padded) { return padded / 4; }

// A panel's size.
struct PanelSize {
    int64_t codes, total;
};

constexpr PanelSize panel_size(int kind, int64_t columns) {
    const int64_t padded = rounded(columns, kBlock);
    if (kind == TW_FP32) return {padded * 64, padded * 64};
    if (kind == TW_BF16 || kind == TW_FP16) return {padded * 32, padded * 32};
    if (kind == kPacked) {
        const int64_t codes = kPackedHead + padded / kBlock * kPackedBlock;
        return {codes, codes + most_exceptions(padded) * (int64_t)sizeof(Exception)};
    }
    const int64_t codes = padded * 2 * code_bits(kind);
    return {codes, rounded(codes + scale_bytes(kind, padded), 64)};
}

// Panel count for these rows. `paired`: half are gate rows, half up rows.
inline int64_t num_panels(int64_t rows, bool paired) {
    if (paired) return 2 * (rounded(rows / 2, kLanes) / kLanes);
    return rounded(rows, 2 * kLanes) / kLanes;
}

}  // namespace tw
