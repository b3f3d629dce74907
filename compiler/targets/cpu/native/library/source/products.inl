// Matmuls between prepared rows and a panel pair, in every arithmetic. Included once per
// translation unit, after its simd_*.h and math.inl.
//
// A row's sum has a fixed column order, independent of concurrent rows.

namespace {

using namespace tw;

#ifndef TW_OWN_DOTS  // else in simd_*.h
// An int8 dot product over four columns per call. BITS is the code width. An accumulator begins with
// `start_word` in every lane.
template <int BITS> inline vi dot_four(vi acc, Codes w, int32_t x) { return BITS == 8 ? dot8(acc, w, x) : dot4(acc, w, x); }
template <int BITS> inline Codes part_of(Codes w, int) { return w; }
template <int BITS> inline vi end_dot(vi sum) { return sum; }

// Most rows whose sums of two panels fit in the registers, and words per column pair in a bfloat16
// row.
constexpr int kPairRows = kTile, kPairWords = 1;
constexpr int kCodeRows = kTile, kByteRows = kTile, kCodePanels = 2;  // of a tile of int8 rows
using PairWord = int32_t;
inline vf dot_second(vf acc, vi, const int32_t*) { return acc; }
inline vf dot_first(vf acc, vi w, const int32_t* x) { return dot_pair(acc, w, *x); }
using FreshPair = vi;  // a pair in registers only
inline FreshPair fresh_pair(vf first, vf second) { return pair_of(first, second); }
inline vf dot_fresh(vf acc, FreshPair w, const int32_t* x) { return dot_pair(acc, w, *x); }
inline void store_pair_words(void* p, int i, vf, vi halves) { store_halves((uint16_t*)p + 16 * i, halves); }

constexpr int32_t kSignedRows = 0;
constexpr void (*quantise_signed)(const float*, int64_t, int32_t, void*, int64_t, int64_t) = nullptr;
#endif
template <int KIND> inline void product_signed(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result);

// Panels per sweep over the columns, for M rows.
template <int M> constexpr int panels() { return M > kPairRows ? 1 : 2; }

// Results for M rows and a pair of panels.
template <int M> struct Tile {
    vf at[M][2];
};

template <int M> inline void clear(Tile<M>& tile) {
    for (int m = 0; m < M; m++) {
        tile.at[m][0] = zeros();
        tile.at[m][1] = zeros();
    }
}

inline vf load_some(const float* p, int count) {
    if (count >= kLanes) return load(p);
    float whole[kLanes] = {};
    for (int i = 0; i < count; i++) whole[i] = p[i];
    return load(whole);
}

inline void store_some(float* p, vf x, int count, bool adds, bool rounds) {
    if (adds) x = add(load_some(p, count), x);
    if (rounds) x = as_bf16(x);
    if (count >= kLanes) return store(p, x);
    float whole[kLanes];
    store(whole, x);
    for (int i = 0; i < count; i++) p[i] = whole[i];
}

template <int M> inline void finish(Tile<M>& tile, const Result& result, int64_t row) {
    for (int m = 0; m < M; m++) {
        vf first = tile.at[m][0], second = tile.at[m][1];
        if (result.bias) {
            first = add(first, load(result.bias));
            second = add(second, load(result.bias + kLanes));
        }
        if (result.rounds) {
            first = as_bf16(first);
            second = as_bf16(second);
        }
        int64_t at = result.offsets ? result.offsets[row + m] : (row + m) * result.stride;
        if (result.swiglu) {
            vf y = result.limit > 0.0f ? clamped_silu_times(first, second, result.limit, result.alpha) : silu_times(first, second);
            store_some(result.first + at, y, result.num_first, result.adds, result.rounds);
        } else {
            store_some(result.first + at, first, result.num_first, result.adds, result.rounds);
            if (result.num_second) store_some(result.second + at, second, result.num_second, result.adds, result.rounds);
        }
    }
}

// Prefetch into the second cache during `count` blocks from `block`. Hardware prefetching stops at a
// page boundary, and a panel has only some pages. Always inlined: compilers may drop calls to a
// function that only prefetches.
__attribute__((always_inline)) inline void fetch(const PanelPair& pair, int64_t block, int64_t count = 1) {
    const Ahead& ahead = pair.ahead;
    const int64_t end = (block + count) * ahead.step < ahead.num_bytes ? (block + count) * ahead.step : ahead.num_bytes;
    for (int64_t at = rounded(block * ahead.step, 64); at < end; at += 64)
        for (int64_t i = 0; i < ahead.num_streams; i++) __builtin_prefetch(ahead.data + i * ahead.stride + at, 0, 1);
}

// int8 rows: sums within a block are exact integers.
template <int KIND, int M> struct Int8Tile {
    static constexpr int kParts = kBlock / scale_length(KIND), kGroups = 8 / kParts, kBits = has_byte_codes(KIND) ? 8 : code_bits(KIND);
    static constexpr int kWords = kBits == 8 ? kByteWords : 1;  // of a row, per four columns
    const uint8_t* codes[2];
    const uint8_t* scales[2];
    const int32_t* rows[M];
    const BlockTerms* terms[M];
    int64_t num_blocks;
    bool fetches;

    Int8Tile(const PanelPair& pair, const Operand& x, int64_t row)
        : codes{pair.first, pair.second}, num_blocks(x.num_blocks), fetches(!row) {
        const int64_t behind = panel_size(KIND, pair.columns).codes;
        scales[0] = pair.first + behind;
        scales[1] = pair.second + behind;
        for (int m = 0; m < M; m++) {
            rows[m] = (const int32_t*)((const uint8_t*)x.values + (row + m) * x.row_bytes);
            terms[m] = x.terms + (row + m) * num_blocks;
        }
    }

    using Dots = vi[M][kCodePanels];

    template <int GROUP> __attribute__((always_inline)) void four(Dots& dot, const int32_t* const (&x)[M], int64_t block, int first) const {
        const int64_t at = block * block_words(KIND) * 64;
TW_UNROLL
        for (int word = 0; word < kWords; word++) {
            Codes w[kCodePanels];
            for (int p = 0; p < kCodePanels; p++) w[p] = part_of<kBits>(four_codes<KIND, GROUP>(codes[first + p] + at), word);
TW_UNROLL
            for (int m = 0; m < M; m++)
                for (int p = 0; p < kCodePanels; p++) dot[m][p] = dot_four<kBits>(dot[m][p], w[p], x[m][GROUP * kWords + word]);
        }
    }

    template <int PART> void part(int64_t block, Tile<M>& tile) const {
        for (int first = 0; first < 2; first += kCodePanels) sweep<PART>(block, tile, first);
    }

    template <int PART> __attribute__((always_inline)) void sweep(int64_t block, Tile<M>& tile, int first) const {
        Dots dot;
        const int32_t* x[M];
TW_UNROLL
        for (int m = 0; m < M; m++) {
            x[m] = rows[m] + block * 8 * kWords;
            TW_OPAQUE(x[m]);
            const vi start = ispread(has_minimums(KIND) ? 0 : terms[m][block].starts[PART]);
            for (int p = 0; p < kCodePanels; p++) dot[m][p] = start;
        }
        constexpr int kFirst = PART * kGroups;
        four<kFirst>(dot, x, block, first);
        four<kFirst + 1>(dot, x, block, first);
        four<kFirst + 2>(dot, x, block, first);
        four<kFirst + 3>(dot, x, block, first);
        if constexpr (kGroups == 8) {
            four<kFirst + 4>(dot, x, block, first);
            four<kFirst + 5>(dot, x, block, first);
            four<kFirst + 6>(dot, x, block, first);
            four<kFirst + 7>(dot, x, block, first);
        }
        const int64_t padded = num_blocks * kBlock;
TW_UNROLL
        for (int p = 0; p < kCodePanels; p++) {
            const int half = first + p;
            vf scale = block_scales<KIND>(scales[half], padded, block * kParts + PART), least = zeros();
            if constexpr (has_minimums(KIND)) least = block_minimums<KIND>(scales[half], padded, block);
TW_UNROLL
            for (int m = 0; m < M; m++) {
                vf value = to_float(end_dot<kBits>(dot[m][p]));
                if constexpr (has_minimums(KIND)) value = fma(value, scale, mul(least, of_bits(ispread(terms[m][block].starts[PART]))));
                else value = mul(value, scale);
                tile.at[m][half] = fma(value, spread(terms[m][block].scales[PART]), tile.at[m][half]);
            }
        }
    }

    // Prefetch the codes some blocks ahead from the second cache into the first.
    __attribute__((always_inline)) void ask_for_codes(int64_t block) const {
        const int64_t at = (block + 4) * block_words(KIND) * 64;
        for (int64_t i = 0; i < block_words(KIND); i++) {
            __builtin_prefetch(codes[0] + at + i * 64, 0, 3);
            __builtin_prefetch(codes[1] + at + i * 64, 0, 3);
        }
    }

    void run(const PanelPair& pair, Tile<M>& tile) const {
        for (int64_t block = 0; block < num_blocks; block++) {
            if (fetches) {
                fetch(pair, block);
                ask_for_codes(block);
            }
            part<0>(block, tile);
            if constexpr (kParts == 2) part<1>(block, tile);
        }
    }
};

// Pairs of bfloat16. Pairs of columns (or positions) are `step` bytes apart.
struct Columns {
    const uint8_t* first;
    const uint8_t* second;
    int64_t step, count;
};

template <int M>
inline void add_pair(vf (&sums)[M][panels<M>()], const vi* w, const PairWord* x, int64_t x_row) {
TW_UNROLL
    for (int m = 0; m < M; m++)
        for (int p = 0; p < panels<M>(); p++) sums[m][p] = dot_second(sums[m][p], w[p], x + m * x_row);
TW_UNROLL
    for (int m = 0; m < M; m++)
        for (int p = 0; p < panels<M>(); p++) sums[m][p] = dot_first(sums[m][p], w[p], x + m * x_row);
}

template <int M> inline void take(vf (&sums)[M][panels<M>()], const Tile<M>& tile, int first) {
TW_UNROLL
    for (int m = 0; m < M; m++)
        for (int p = 0; p < panels<M>(); p++) sums[m][p] = tile.at[m][first + p];
}

template <int M> inline void give(const vf (&sums)[M][panels<M>()], Tile<M>& tile, int first) {
TW_UNROLL
    for (int m = 0; m < M; m++)
        for (int p = 0; p < panels<M>(); p++) tile.at[m][first + p] = sums[m][p];
}

// `x_row`: words from row to row.
template <int M>
inline void tile_bf16(const Columns& w, const PairWord* x, int64_t x_row, Tile<M>& tile) {
    for (int first = 0; first < 2; first += panels<M>()) {
        const uint8_t* from[2] = {w.first, w.second};
        vf sums[M][panels<M>()];
        take<M>(sums, tile, first);
        for (int64_t pair = 0; pair < w.count; pair++) {
            vi own[panels<M>()];
            for (int p = 0; p < panels<M>(); p++) own[p] = iload(from[first + p] + pair * w.step);
            add_pair<M>(sums, own, x + pair * kPairWords, x_row);
        }
        give<M>(sums, tile, first);
    }
}

// Packed panels. `fetches` enables prefetching.
template <int M>
inline void tile_packed(const PanelPair& pair, const PairWord* x, int64_t x_row, bool fetches, Tile<M>& tile) {
    Packed first(pair.first, pair.columns), second(pair.second, pair.columns);
    for (int64_t block = 0; block < rounded(pair.columns, kBlock) / kBlock; block++) {
        if (fetches) fetch(pair, block);
        if (!first.is_plain(block) || !second.is_plain(block)) {
            alignas(64) uint8_t values[2][kBlock * kLanes * 2];
            first.unpack(block, values[0]);
            second.unpack(block, values[1]);
            tile_bf16<M>({values[0], values[1], 64, kBlock / 2}, x + block * kBlock / 2 * kPairWords, x_row, tile);
            continue;
        }
        for (int half = 0; half < 2; half += panels<M>()) {
            vf sums[M][panels<M>()];
            take<M>(sums, tile, half);
            for (int64_t group = 4 * block; group < 4 * block + 4; group++) {
                vi w[2][4];
                if (!half) first.four_pairs(group, w[0]);
                if (half + panels<M>() == 2) second.four_pairs(group, w[1]);
TW_UNROLL
                for (int i = 0; i < 4; i++) {
                    vi own[panels<M>()];
                    for (int p = 0; p < panels<M>(); p++) own[p] = w[half + p][i];
                    add_pair<M>(sums, own, x + (4 * group + i) * kPairWords, x_row);
                }
            }
            give<M>(sums, tile, half);
        }
    }
}

template <int KIND> inline vf column_of(const uint8_t* p) {
    if constexpr (KIND == TW_FP16) return float16s(p);
    return load((const float*)p);
}

template <int M, int KIND = TW_FP32>
inline void tile_fp32(const Columns& w, const float* x, int64_t x_row, Tile<M>& tile) {
    for (int64_t k = 0; k < w.count; k++) {
        vf w0 = column_of<KIND>(w.first + k * w.step), w1 = column_of<KIND>(w.second + k * w.step);
TW_UNROLL
        for (int m = 0; m < M; m++) {
            vf one = spread(x[m * x_row + k]);
            tile.at[m][0] = fma(w0, one, tile.at[m][0]);
            tile.at[m][1] = fma(w1, one, tile.at[m][1]);
        }
    }
}

// Codes as bfloat16. A block's sum is scaled, then added. `IS_FRESH`: `codes` is scratch for some
// columns, which stay in the first cache. Otherwise it has both panels.
template <int KIND, bool IS_FRESH, int M>
inline void tile_scaled(const PanelPair& pair, uint8_t* codes, const PairWord* x, int64_t x_row, bool fetches, Tile<M>& tile) {
    constexpr int64_t kLength = scale_length(KIND), kSpan = kLength < kBlock ? kBlock : kLength;
    const PanelSize size = panel_size(KIND, pair.columns);
    const int64_t padded = rounded(pair.columns, kBlock);
    for (int64_t first = 0; first < padded; first += kSpan) {
        const int64_t count = padded - first < kSpan ? padded - first : kSpan;
        const uint8_t* at = codes + first * 32;
        int64_t apart = padded * 32;
        if constexpr (IS_FRESH) {
            if (fetches) fetch(pair, first / kBlock, count / kBlock);
            const int64_t source = first / kBlock * block_words(KIND) * 64;
            at = codes;
            apart = count * 32;
            codes_to_bf16<KIND>(pair.first + source, count, codes);
            codes_to_bf16<KIND>(pair.second + source, count, codes + apart);
        }
        for (int64_t k = 0; k < count; k += kLength) {
            Tile<M> part;
            clear(part);
            const int64_t num_pairs = (count - k < kLength ? count - k : kLength) / 2;
            tile_bf16<M>({at + k * 32, at + apart + k * 32, 64, num_pairs}, x + (first + k) / 2 * kPairWords, x_row, part);
            vf scale0 = block_scales<KIND>(pair.first + size.codes, padded, (first + k) / kLength);
            vf scale1 = block_scales<KIND>(pair.second + size.codes, padded, (first + k) / kLength);
TW_UNROLL
            for (int m = 0; m < M; m++) {
                tile.at[m][0] = fma(part.at[m][0], scale0, tile.at[m][0]);
                tile.at[m][1] = fma(part.at[m][1], scale1, tile.at[m][1]);
            }
        }
    }
}

template <int M, class Make> inline void tile_of(int64_t count, int64_t row, Make& make) {
    if (count == M) return make.template rows<M>(row);
    if constexpr (M > 1) tile_of<M - 1>(count, row, make);
}

// Call `make.template rows<M>(row)` for all rows, in groups that fit in registers. The last two groups
// are even: small groups are slow.
template <int ROWS, class Make> inline void by_tiles(int64_t num_rows, Make make) {
    for (int64_t row = 0, count; row < num_rows; row += count) {
        const int64_t left = num_rows - row;
        count = left > 2 * ROWS ? ROWS : left > ROWS ? (left + 1) / 2 : left;
        tile_of<ROWS>(count, row, make);
    }
}

template <int KIND> struct MakeInt8 {
    const PanelPair& pair;
    const Operand& x;
    const Result& result;
    template <int M> void rows(int64_t row) {
        Tile<M> tile;
        clear(tile);
        Int8Tile<KIND, M>(pair, x, row).run(pair, tile);
        finish(tile, result, row);
    }
};

struct ProductInt8 {
    const PanelPair& pair;
    const Operand& x;
    int64_t num_rows;
    const Result& result;
    template <int KIND> void kind() {
        if constexpr (kSignedRows && has_byte_codes(KIND) && !has_float_codes(KIND))
            if (x.is_signed) return product_signed<KIND>(pair, x, num_rows, result);
        if constexpr (!has_float_codes(KIND)) by_tiles<has_byte_codes(KIND) ? kByteRows : kCodeRows>(num_rows, MakeInt8<KIND>{pair, x, result});
    }
};

void product_int8(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result) {
    by_kind(pair.kind, ProductInt8{pair, x, num_rows, result});
}

template <int KIND, bool IS_FRESH = false> struct MakeBf16 {
    const PanelPair& pair;
    const Operand& x;
    const Result& result;
    uint8_t* codes;
    template <int M> void rows(int64_t row) {
        const PairWord* own = (const PairWord*)((const uint8_t*)x.values + row * x.row_bytes);
        Tile<M> tile;
        clear(tile);
        if constexpr (KIND == kPacked)
            tile_packed<M>(pair, own, x.row_bytes / 4, !row, tile);
        else if constexpr (KIND == TW_BF16) {
            const int64_t part = row ? x.num_blocks : 1;  // the first tile prefetches
            for (int64_t block = 0; block < x.num_blocks; block += part) {
                if (!row) fetch(pair, block);
                tile_bf16<M>({pair.first + block * 1024, pair.second + block * 1024, 64, 16 * part}, own + block * 16 * kPairWords, x.row_bytes / 4, tile);
            }
        }
        else
            tile_scaled<KIND, IS_FRESH>(pair, codes, own, x.row_bytes / 4, !row, tile);
        finish(tile, result, row);
    }
};

struct ScaledBf16 {
    const PanelPair& pair;
    const Operand& x;
    int64_t num_rows;
    const Result& result;
    uint8_t* codes;
    template <int KIND> void kind() {
        if constexpr (!has_minimums(KIND)) {  // minimums are not codes
            if (num_rows <= kTile) return by_tiles<kTile>(num_rows, MakeBf16<KIND, true>{pair, x, result, codes});
            const int64_t padded = rounded(pair.columns, kBlock);
            codes_to_bf16<KIND>(pair.first, padded, codes);
            codes_to_bf16<KIND>(pair.second, padded, codes + padded * 32);
            by_tiles<kTile>(num_rows, MakeBf16<KIND>{pair, x, result, codes});
        }
    }
};

constexpr int kMaxPackedTiles = 3, kMaxFp16Tiles = 6;

// Unpack in registers for every tile of rows, which is cheaper than a store. For large numbers of
// rows, unpack whole panels first.
void product_packed(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result, uint8_t* values) {
    if (num_rows <= kMaxPackedTiles * kTile) return by_tiles<kTile>(num_rows, MakeBf16<kPacked>{pair, x, result, nullptr});
    const int64_t bytes = panel_size(TW_BF16, pair.columns).total;
    unpack_panel(pair.first, pair.columns, values);
    unpack_panel(pair.second, pair.columns, values + bytes);
    const PanelPair plain{TW_BF16, pair.columns, values, values + bytes, pair.ahead};
    by_tiles<kTile>(num_rows, MakeBf16<TW_BF16>{plain, x, result, nullptr});
}

void product_bf16(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result, void* scratch) {
    if (pair.kind == kPacked) return product_packed(pair, x, num_rows, result, (uint8_t*)scratch);
    if (pair.kind == TW_BF16) return by_tiles<kTile>(num_rows, MakeBf16<TW_BF16>{pair, x, result, nullptr});
    by_kind(pair.kind, ScaledBf16{pair, x, num_rows, result, (uint8_t*)scratch});
}

struct MakeFp32 {
    const Columns& w;
    const Operand& x;
    const Result& result;
    template <int M> void rows(int64_t row) {
        const float* own = (const float*)((const uint8_t*)x.values + row * x.row_bytes);
        Tile<M> tile;
        clear(tile);
        tile_fp32<M>(w, own, x.row_bytes / 4, tile);
        finish(tile, result, row);
    }
};

// Widen in registers, a block at a time.
struct MakeFp16 {
    const PanelPair& pair;
    const Operand& x;
    const Result& result;
    template <int M> void rows(int64_t row) {
        const float* own = (const float*)((const uint8_t*)x.values + row * x.row_bytes);
        Tile<M> tile;
        clear(tile);
        for (int64_t block = 0; block < x.num_blocks; block++) {
            if (!row) fetch(pair, block);
            tile_fp32<M, TW_FP16>({pair.first + block * 1024, pair.second + block * 1024, 32, kBlock}, own + block * kBlock, x.row_bytes / 4, tile);
        }
        finish(tile, result, row);
    }
};

void product_fp32(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result, void* scratch) {
    if (pair.kind == TW_FP16 && num_rows <= kMaxFp16Tiles * kTile) return by_tiles<kPairRows>(num_rows, MakeFp16{pair, x, result});
    const int64_t padded = x.num_blocks * kBlock;
    Columns w{pair.first, pair.second, 64, padded};
    if (pair.kind != TW_FP32) {
        float* values = (float*)scratch;
        to_fp32(pair.kind, pair.first, pair.columns, values);
        to_fp32(pair.kind, pair.second, pair.columns, values + padded * kLanes);
        w.first = (const uint8_t*)values;
        w.second = (const uint8_t*)(values + padded * kLanes);
    }
    by_tiles<kPairRows>(num_rows, MakeFp32{w, x, result});
}

}  // namespace
