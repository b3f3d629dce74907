// Cache layout of keys and values, in attention's reading order. A slot has chunks of 64 positions.
// A chunk has layers, a layer has heads, and a head has keys then values. A slot's used memory
// therefore grows from its beginning and fills large pages. Layers with another window follow in
// the same order, so that invisible positions can be freed.
//
// A chunk's layout:
// - bfloat16: keys [4][dim / 2][16][2], values [32][dim][2]. A pair is two neighboring channels of
//   a key, or a channel at two neighboring positions.
// - float: keys [4][dim][16], values [64][dim].
// - BFP8: signed codes for keys [4][dim / 4][16][4] and values [16][dim][4], with fours like pairs.
//   Exponents per 16 channels follow: keys [4][dim / 16][16], values [dim / 16][64].
//
// Zeros pad channels to whole 16.
#pragma once

#include "panels.h"

namespace tw {

constexpr int kPositions = 64;   // positions per chunk
constexpr int kSegment = 512;    // positions per attention segment
constexpr int kReachBack = 1024; // maximum truncation after freeing positions

struct CacheLayout {
    int64_t dim = 0, chunk_bytes = 0;  // per chunk: keys or values of a head
    int64_t offset = 0, step = 0;      // of the first chunk in a slot; distance to the next
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
    int64_t unpacked_bytes() const { return is_blocks() ? 2 * kSegment * dim * 2 : 0; }  // per segment
};

// Float count in a slot's constant-size state. A window is [positions][channels]. A head's
// matrix is [key][value]. Zeros pad channels and values to whole 16.
inline int64_t num_kept(const TwState& state) {
    if (state.kind == TW_WINDOW) return state.head_dim * rounded(state.num_heads, kLanes);
    if (state.kind == TW_MATRIX) return (int64_t)state.num_heads * state.head_dim * rounded(state.value_dim, kLanes);
    return 0;
}

}  // namespace tw
