// Keys and values of sequences, in the order in which attention reads them: seat by seat, of a seat
// 64 positions after another, of these layer by layer, and of a layer its heads, keys then values.
// So what a seat takes grows from its beginning, and large pages are filled. Layers of another window
// lie behind, in the same order, so that what they do not see any more can be given back.
//
// Of 64 positions, bfloat16: keys [4][dim / 2][16][2], values [32][dim][2]; a pair is two
// neighbouring channels of a key, or one channel of two neighbouring positions. float: keys
// [4][dim][16], values [64][dim]. BFP8: signed codes of keys [4][dim / 4][16][4] and of values
// [16][dim][4], fours as pairs; behind them exponents of 16 channels each, of keys [4][dim / 16][16],
// of values [dim / 16][64]. Channels are padded with zeros to whole 16.
#pragma once

#include "panels.h"

namespace tw {

constexpr int kPositions = 64;   // a cache's positions are whole such chunks
constexpr int kSegment = 512;    // positions that are attended to on their own, then merged
constexpr int kReachBack = 1024; // positions that a sequence whose caches were given back can be cut back

struct CacheLayout {
    int64_t dim = 0, chunk_bytes = 0;  // of 64 positions of a head's keys, or of its values
    int64_t offset = 0, step = 0;      // where a seat has the first 64 positions; from these to the next
    int32_t cache = TW_CACHE_FP32;

    explicit CacheLayout(const TwState& state) {
        if (state.kind != TW_KEYS_VALUES) return;
        dim = rounded(state.head_dim, kLanes);
        cache = state.cache;
        const int64_t count = kPositions * dim;
        chunk_bytes = cache == TW_CACHE_FP32 ? count * 4 : cache == TW_CACHE_BF16 ? count * 2 : count + count / 16;
    }

    bool is_float() const { return cache == TW_CACHE_FP32; }
    bool is_blocks() const { return cache == TW_CACHE_BFP8; }
    int64_t unpacked_bytes() const { return is_blocks() ? 2 * kSegment * dim * 2 : 0; }  // of a segment
};

// Floats that a seat keeps of a state whatever its length: a window is [positions][channels], a
// head's matrix [key][value], channels and values padded with zeros to whole 16.
inline int64_t num_kept(const TwState& state) {
    if (state.kind == TW_WINDOW) return state.head_dim * rounded(state.num_heads, kLanes);
    if (state.kind == TW_MATRIX) return (int64_t)state.num_heads * state.head_dim * rounded(state.value_dim, kLanes);
    return 0;
}

}  // namespace tw
