// How weights lie in memory: panels of 16 rows (outputs), an even number of them.
//
// Every kind but a vector begins with codes and, of block formats, ends with scales, panel by panel:
//   FP32  [columns][16] float
//   BF16  [columns / 2][16][2] bfloat16: two neighbours of a row are a pair
//   Q80, BFP8  [columns / 4][16][4] uint8, code + 128
//   Q40, BFP4  [columns / 8][16][4] uint8: of 8 columns the first four in the low halves, the next
//              four in the high ones, code + 8
//   Q41   as Q40, the code itself: what is added to it is the block's minimum
// scales: of Q80, Q40 and Q41 [columns / 32][16] float16, of Q41 then as many minimums; of BFP8 and BFP4 [columns / 16][16] uint8 e,
// the scale being 2 ** (e - 127), or 0 where e is 0. Columns are padded with zeros to whole 32.
// A paired weight has a panel of gate and the panel of its up in turns.
#pragma once

#include "interface.h"

namespace tw {

constexpr int kLanes = 16;
constexpr int kBlock = 32;

inline int64_t rounded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// What a panel of a kind takes.
struct PanelSize {
    int64_t codes, total;
};

inline PanelSize panel_size(int kind, int64_t columns) {
    int64_t wide = rounded(columns, kBlock), codes = 0;
    int64_t scales = wide / kBlock * (kind == TW_Q41 ? 64 : 32);
    switch (kind) {
        case TW_FP32: return {wide * 64, wide * 64};
        case TW_BF16: return {wide * 32, wide * 32};
        case TW_Q80: case TW_BFP8: codes = wide * 16; break;
        default: codes = wide * 8;
    }
    return {codes, rounded(codes + scales, 64)};
}

inline bool in_blocks(int kind) { return kind >= TW_Q80 && kind <= TW_Q41; }

// Panels of so many rows; `paired`: half of them gate, half up.
inline int64_t num_panels(int64_t rows, bool paired) {
    if (paired) return 2 * (rounded(rows / 2, kLanes) / kLanes);
    return rounded(rows, 2 * kLanes) / kLanes;
}

}  // namespace tw
