// How weights lie in memory: panels of 16 rows (outputs), an even number of them.
//
// Every kind but a vector begins with codes and, of block formats, ends with scales, panel by panel:
//   FP32  [columns][16] float
//   BF16  [columns / 2][16][2] bfloat16: two neighbours of a row are a pair
//   FP16  [columns][16] float16
//   codes of 8 bits  [columns / 4][16][4] uint8, code + 128
//   codes of 4 bits  [columns / 8][16][4] uint8: of 8 columns the first four in the low halves, the
//              next four in the high ones
//   codes of 5 and 6 bits  for every 32 columns, 4 bits of each as above, then the rest of each: 32
//              bits of a row a word, [16] words, bit 8 * j + i being of column 4 * i + j; or two bits
//              of each, [2][16] words of 16 columns, bit 8 * j + 2 * i on being of column 4 * i + j
// Codes are unsigned: `zero_of` is the code of 0, or the block's minimum is added.
// scales, of S = columns / 32 and T = columns / 256, rounded up:
//   Q80, Q40, Q50  [S][16] float16; Q41, Q51  then as many minimums
//   BFP8, BFP4     [columns / 16][16] uint8 e, the scale being 2 ** (e - 127), or 0 where e is 0
//   Q6_K           [T][16] float16, then [columns / 16][16] int8: a scale is their product
//   Q4_K, Q5_K     [T][2][16] float16, of scales and of minimums, then for every two blocks of 32
//              [3][16] uint8: the first's scale and 2 low bits of its minimum, the second's, and
//              both minimums' 4 high bits
//   kPacked  what an engine makes of BF16 as it copies weights: the same values in 12 bits. 64 bytes:
//              the number of exceptions (uint32), at byte 16 the 16 upper bytes that values have most.
//              [columns / 8][3][64] uint8: of 8 columns the lower bytes, two pairs and two pairs, then
//              4 bits each of the places of their upper bytes among the 16, the first two pairs' low.
//              Of two pairs' 64 bytes, every 16 are 8 of the first and 8 of the second. Then
//              [columns / 4] exceptions, in the order of columns: a value whose upper byte is another.
// Columns are padded with zeros to whole 32. A paired weight has a panel of gate and the panel of its
// up in turns.
#pragma once

#include "interface.h"

namespace tw {

constexpr int kLanes = 16;
constexpr int kBlock = 32;
constexpr int kSuper = 256;

constexpr int64_t rounded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

constexpr bool in_blocks(int kind) { return kind >= TW_Q80 && kind < TW_VECTOR; }

constexpr int code_bits(int kind) {
    switch (kind) {
        case TW_Q80: case TW_BFP8: return 8;
        case TW_Q6_K: return 6;
        case TW_Q50: case TW_Q51: case TW_Q5_K: return 5;
        default: return 4;
    }
}

constexpr bool has_minimums(int kind) {
    return kind == TW_Q41 || kind == TW_Q51 || kind == TW_Q4_K || kind == TW_Q5_K;
}

constexpr int zero_of(int kind) { return has_minimums(kind) ? 0 : 1 << (code_bits(kind) - 1); }

// Columns per scale.
constexpr int scale_length(int kind) { return kind == TW_BFP8 || kind == TW_BFP4 || kind == TW_Q6_K ? 16 : 32; }

constexpr int64_t scale_bytes(int kind, int64_t wide) {
    const int64_t supers = rounded(wide, kSuper) / kSuper;
    switch (kind) {
        case TW_Q4_K: case TW_Q5_K: return supers * 64 + rounded(wide, 64) / 64 * 48;
        case TW_Q6_K: return supers * 32 + wide;
        case TW_Q41: case TW_Q51: return wide * 2;
        default: return wide;
    }
}

// Engine-internal kind, invalid in a program.
constexpr int kPacked = TW_NUM_KINDS;
constexpr int64_t kPackedHead = 64, kPackedTable = 16, kPackedGroup = 192, kPackedBlock = 4 * kPackedGroup;

// A value in a packed panel, at `index` in [columns / 2][16][2].
struct Exception {
    uint32_t index, value;
};

constexpr int64_t most_exceptions(int64_t wide) { return wide / 4; }

// Size of a panel.
struct PanelSize {
    int64_t codes, total;
};

constexpr PanelSize panel_size(int kind, int64_t columns) {
    const int64_t wide = rounded(columns, kBlock);
    if (kind == TW_FP32) return {wide * 64, wide * 64};
    if (kind == TW_BF16 || kind == TW_FP16) return {wide * 32, wide * 32};
    if (kind == kPacked) {
        const int64_t codes = kPackedHead + wide / kBlock * kPackedBlock;
        return {codes, codes + most_exceptions(wide) * (int64_t)sizeof(Exception)};
    }
    const int64_t codes = wide * 2 * code_bits(kind);
    return {codes, rounded(codes + scale_bytes(kind, wide), 64)};
}

// Number of panels for these rows. `paired`: half are gate rows, half up rows.
inline int64_t num_panels(int64_t rows, bool paired) {
    if (paired) return 2 * (rounded(rows / 2, kLanes) / kLanes);
    return rounded(rows, 2 * kLanes) / kLanes;
}

}  // namespace tw
