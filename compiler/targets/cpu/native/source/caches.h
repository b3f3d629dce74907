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

    CacheLayout(const TwState& state, int64_t max_context) {
        dim = rounded(state.head_dim, kLanes);
        is_bf16 = state.is_bf16;
        head_bytes = rounded(max_context, kPositions) * dim * (is_bf16 ? 2 : 4);
        seat_bytes = rounded(2 * state.num_heads * head_bytes, 4096);
    }

    // Bytes that the first positions take of the keys, or the values, of a head; whole blocks of 16.
    int64_t bytes_of(int64_t num_positions) const { return rounded(num_positions, 16) * dim * (is_bf16 ? 2 : 4); }
};

}  // namespace tw
