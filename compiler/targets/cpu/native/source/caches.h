// Keys and values of a layer's heads, seat by seat, in the order in which attention reads them.
//
// bfloat16: keys [positions / 16][dim / 2][16][2], values [positions / 2][dim][2]; a pair is two
// neighbouring channels of a key, or one channel of two neighbouring positions. float: keys
// [positions / 16][dim][16], values [positions][dim]. Channels are padded with zeros to whole 16.
#pragma once

#include "panels.h"

namespace tw {

constexpr int kPositions = 64;   // a cache's positions are whole such chunks
constexpr int kSegment = 512;    // positions that are attended to on their own, then merged

struct CacheLayout {
    int64_t dim, head_bytes, seat_bytes;  // of keys or of values; of both, of all heads
    bool is_bf16;

    CacheLayout(const TwState& state, int64_t max_context) : dim(0), head_bytes(0), seat_bytes(0), is_bf16(false) {
        if (state.kind != TW_KEYS_VALUES) return;
        dim = rounded(state.head_dim, kLanes);
        is_bf16 = state.is_bf16;
        head_bytes = rounded(max_context, kPositions) * dim * (is_bf16 ? 2 : 4);
        seat_bytes = rounded(2 * state.num_heads * head_bytes, 4096);
    }

    // Bytes that the first positions take of the keys, or the values, of a head; whole blocks of 16.
    int64_t bytes_of(int64_t num_positions) const { return rounded(num_positions, 16) * position_bytes(); }
    int64_t position_bytes() const { return dim * (is_bf16 ? 2 : 4); }
};

// Floats that a seat keeps of a state whatever its length: a window is [positions][channels], a
// head's matrix [key][value], channels and values padded with zeros to whole 16.
inline int64_t num_kept(const TwState& state) {
    if (state.kind == TW_WINDOW) return state.head_dim * rounded(state.num_heads, kLanes);
    if (state.kind == TW_MATRIX) return (int64_t)state.num_heads * state.head_dim * rounded(state.value_dim, kLanes);
    return 0;
}

}  // namespace tw
