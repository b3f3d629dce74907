// Products of prepared rows with a pair of panels, in every arithmetic; included once a translation
// unit, behind its simd_*.h and math.inl.
//
// A row's sum goes over its columns in one order, whatever rows stand beside it.

namespace {

using namespace tw;

// Results of M rows and one pair of panels.
template <int M> struct Tile {
    vf at[M][2];
};

template <int M> inline void clear(Tile<M>& tile) {
    for (int m = 0; m < M; m++) tile.at[m][0] = tile.at[m][1] = zeros();
}

inline vf load_some(const float* p, int count) {
    if (count >= kLanes) return load(p);
    float whole[kLanes] = {};
    for (int i = 0; i < count; i++) whole[i] = p[i];
    return load(whole);
}

inline void store_some(float* p, vf x, int count, bool adds) {
    if (count >= kLanes) {
        store(p, adds ? add(load(p), x) : x);
        return;
    }
    float whole[kLanes];
    store(whole, x);
    for (int i = 0; i < count; i++) p[i] = adds ? p[i] + whole[i] : whole[i];
}

template <int M> inline void finish(Tile<M>& tile, const Result& result, int64_t row) {
    for (int m = 0; m < M; m++) {
        vf first = tile.at[m][0], second = tile.at[m][1];
        if (result.bias) {
            first = add(first, load(result.bias));
            second = add(second, load(result.bias + kLanes));
        }
        int64_t at = result.offsets ? result.offsets[row + m] : (row + m) * result.stride;
        if (result.swiglu) {
            store_some(result.first + at, silu_times(first, second), result.num_first, result.adds);
        } else {
            store_some(result.first + at, first, result.num_first, result.adds);
            if (result.num_second) store_some(result.second + at, second, result.num_second, result.adds);
        }
    }
}

template <int KIND> inline vf block_scales(const uint8_t* scales, int64_t block) {
    if (KIND == TW_Q80 || KIND == TW_Q40 || KIND == TW_Q41) return float16s(scales + block * 32);
    return of_bits(left<23>(widened(scales + block * 16)));
}

// int8 rows: sums of a block are integers, and so exact.
template <int KIND, int M>
inline void tile_int8(const PanelPair& pair, const Operand& x, int64_t row, Tile<M>& tile) {
    constexpr bool kWide = KIND == TW_Q80 || KIND == TW_BFP8;
    constexpr int kParts = KIND == TW_BFP8 || KIND == TW_BFP4 ? 2 : 1;
    const PanelSize size = panel_size(KIND, pair.columns);
    const uint8_t* codes[2] = {pair.first, pair.second};
    const int32_t* rows[M];
    const float* scales[M];
    const int32_t* sums[M];
    for (int m = 0; m < M; m++) {
        rows[m] = (const int32_t*)((const uint8_t*)x.values + (row + m) * x.row_bytes);
        scales[m] = x.scales + (row + m) * x.num_blocks;
        sums[m] = x.sums + (row + m) * x.num_blocks * 2;
    }
    for (int64_t block = 0; block < x.num_blocks; block++) {
TW_UNROLL
        for (int part = 0; part < kParts; part++) {
            vi dot[M][2];
TW_UNROLL
            for (int m = 0; m < M; m++) {
                int32_t sum = kParts == 2 ? sums[m][2 * block + part] : sums[m][2 * block] + sums[m][2 * block + 1];
                dot[m][0] = dot[m][1] = KIND == TW_Q41 ? ispread(0) : kWide ? begin8(sum) : begin4(sum);
            }
            if (kWide) {
TW_UNROLL
                for (int group = part * 8 / kParts; group < (part + 1) * 8 / kParts; group++) {
                    Codes w0 = iload(codes[0] + block * 512 + group * 64);
                    Codes w1 = iload(codes[1] + block * 512 + group * 64);
TW_UNROLL
                    for (int m = 0; m < M; m++) {
                        int32_t four = rows[m][block * 8 + group];
                        dot[m][0] = dot8(dot[m][0], w0, four);
                        dot[m][1] = dot8(dot[m][1], w1, four);
                    }
                }
            } else {
                const vi low = ispread(0x0f0f0f0f);
TW_UNROLL
                for (int two = part * 4 / kParts; two < (part + 1) * 4 / kParts; two++) {
                    vi w0 = iload(codes[0] + block * 256 + two * 64), w1 = iload(codes[1] + block * 256 + two * 64);
                    Codes a0 = iand(w0, low), a1 = iand(w1, low);
                    Codes b0 = iand(right<4>(w0), low), b1 = iand(right<4>(w1), low);
TW_UNROLL
                    for (int m = 0; m < M; m++) {
                        int32_t first = rows[m][block * 8 + two * 2], second = rows[m][block * 8 + two * 2 + 1];
                        dot[m][0] = dot4(dot4(dot[m][0], a0, first), b0, second);
                        dot[m][1] = dot4(dot4(dot[m][1], a1, first), b1, second);
                    }
                }
            }
            vf scale0 = block_scales<KIND>(codes[0] + size.codes, block * kParts + part);
            vf scale1 = block_scales<KIND>(codes[1] + size.codes, block * kParts + part);
            if (KIND == TW_Q41) {
                const uint8_t* minimums = pair.first + size.codes + x.num_blocks * 32;
                vf least0 = float16s(minimums + block * 32), least1 = float16s(minimums + size.total + block * 32);
TW_UNROLL
                for (int m = 0; m < M; m++) {
                    vf own = spread(scales[m][block]);
                    vf sum = spread((float)(sums[m][2 * block] + sums[m][2 * block + 1]));
                    tile.at[m][0] = fma(fma(to_float(dot[m][0]), scale0, mul(least0, sum)), own, tile.at[m][0]);
                    tile.at[m][1] = fma(fma(to_float(dot[m][1]), scale1, mul(least1, sum)), own, tile.at[m][1]);
                }
                continue;
            }
TW_UNROLL
            for (int m = 0; m < M; m++) {
                vf own = spread(scales[m][block]);
                tile.at[m][0] = fma(mul(to_float(dot[m][0]), scale0), own, tile.at[m][0]);
                tile.at[m][1] = fma(mul(to_float(dot[m][1]), scale1), own, tile.at[m][1]);
            }
        }
    }
}

// Pairs of bfloat16, `step` bytes from one pair of columns (or positions) to the next.
struct Columns {
    const uint8_t* first;
    const uint8_t* second;
    int64_t step, count;
};

template <int M>
inline void tile_bf16(const Columns& w, const int32_t* x, int64_t x_row, Tile<M>& tile) {
    for (int64_t pair = 0; pair < w.count; pair++) {
        vi w0 = iload(w.first + pair * w.step), w1 = iload(w.second + pair * w.step);
TW_UNROLL
        for (int m = 0; m < M; m++) {
            int32_t two = x[m * x_row + pair];
            tile.at[m][0] = dot_pair(tile.at[m][0], w0, two);
            tile.at[m][1] = dot_pair(tile.at[m][1], w1, two);
        }
    }
}

template <int M>
inline void tile_fp32(const Columns& w, const float* x, int64_t x_row, Tile<M>& tile) {
    for (int64_t k = 0; k < w.count; k++) {
        vf w0 = load((const float*)(w.first + k * w.step)), w1 = load((const float*)(w.second + k * w.step));
TW_UNROLL
        for (int m = 0; m < M; m++) {
            vf one = spread(x[m * x_row + k]);
            tile.at[m][0] = fma(w0, one, tile.at[m][0]);
            tile.at[m][1] = fma(w1, one, tile.at[m][1]);
        }
    }
}

// Codes as bfloat16 in `codes`: the sum of a block is scaled, then added.
template <int KIND, int M>
inline void tile_scaled(const PanelPair& pair, const uint8_t* codes, const int32_t* x, int64_t x_row, Tile<M>& tile) {
    constexpr int kPairs = KIND == TW_Q80 || KIND == TW_Q40 ? 16 : 8;
    const PanelSize size = panel_size(KIND, pair.columns);
    const int64_t wide = rounded(pair.columns, kBlock);
    for (int64_t block = 0; block < wide / (2 * kPairs); block++) {
        const uint8_t* at = codes + block * kPairs * 64;
        Tile<M> part;
        clear(part);
        tile_bf16<M>({at, at + wide * 32, 64, kPairs}, x + block * kPairs, x_row, part);
        vf scale0 = block_scales<KIND>(pair.first + size.codes, block);
        vf scale1 = block_scales<KIND>(pair.second + size.codes, block);
TW_UNROLL
        for (int m = 0; m < M; m++) {
            tile.at[m][0] = fma(part.at[m][0], scale0, tile.at[m][0]);
            tile.at[m][1] = fma(part.at[m][1], scale1, tile.at[m][1]);
        }
    }
}

template <int J> inline vf code8(vi four) {
    return to_float(iadd(iand(right<8 * J>(four), ispread(255)), ispread(-128)));
}
template <int J, int ZERO> inline vf code4(vi eight) {
    return to_float(iadd(iand(right<J>(eight), ispread(15)), ispread(-ZERO)));
}
inline vi pair_of(vf first, vf second) {
    return ior(right<16>(bits(first)), iand(bits(second), ispread((int32_t)0xffff0000)));
}

// Calls `put(column, four values)` for every four columns of a panel of codes.
template <int KIND, class Put> inline void each_four(const uint8_t* codes, int64_t wide, Put put) {
    if (KIND == TW_Q80 || KIND == TW_BFP8) {
        for (int64_t k = 0; k < wide; k += 4) {
            vi four = iload(codes + k * 16);
            put(k, code8<0>(four), code8<1>(four), code8<2>(four), code8<3>(four));
        }
    } else {
        constexpr int kZero = KIND == TW_Q41 ? 0 : 8;
        for (int64_t k = 0; k < wide; k += 8) {
            vi eight = iload(codes + k * 8);
            put(k, code4<0, kZero>(eight), code4<8, kZero>(eight), code4<16, kZero>(eight), code4<24, kZero>(eight));
            put(k + 4, code4<4, kZero>(eight), code4<12, kZero>(eight), code4<20, kZero>(eight), code4<28, kZero>(eight));
        }
    }
}

template <int KIND> inline void codes_to_bf16(const uint8_t* panel, int64_t wide, uint8_t* out) {
    each_four<KIND>(panel, wide, [out](int64_t k, vf a, vf b, vf c, vf d) {
        istore(out + k * 32, pair_of(a, b));
        istore(out + k * 32 + 64, pair_of(c, d));
    });
}

template <int KIND> inline void panel_to_fp32(const uint8_t* panel, int64_t columns, float* out) {
    constexpr int kLength = KIND == TW_BFP8 || KIND == TW_BFP4 ? 16 : 32;
    const int64_t minimums = rounded(columns, kBlock);  // bytes of all scales
    const uint8_t* scales = panel + panel_size(KIND, columns).codes;
    each_four<KIND>(panel, rounded(columns, kBlock), [=](int64_t k, vf a, vf b, vf c, vf d) {
        vf scale = block_scales<KIND>(scales, k / kLength);
        vf least = KIND == TW_Q41 ? float16s(scales + minimums + k / kLength * 32) : zeros();
        store(out + k * 16, add(mul(a, scale), least));
        store(out + k * 16 + 16, add(mul(b, scale), least));
        store(out + k * 16 + 32, add(mul(c, scale), least));
        store(out + k * 16 + 48, add(mul(d, scale), least));
    });
}

inline void bf16_to_fp32(const uint8_t* panel, int64_t wide, float* out) {
    for (int64_t k = 0; k < wide; k += 2) {
        vi two = iload(panel + k * 32);
        store(out + k * 16, of_bits(left<16>(two)));
        store(out + k * 16 + 16, of_bits(iand(two, ispread((int32_t)0xffff0000))));
    }
}

inline void to_fp32(int kind, const uint8_t* panel, int64_t columns, float* out) {
    switch (kind) {
        case TW_BF16: return bf16_to_fp32(panel, rounded(columns, kBlock), out);
        case TW_Q80: return panel_to_fp32<TW_Q80>(panel, columns, out);
        case TW_Q40: return panel_to_fp32<TW_Q40>(panel, columns, out);
        case TW_Q41: return panel_to_fp32<TW_Q41>(panel, columns, out);
        case TW_BFP8: return panel_to_fp32<TW_BFP8>(panel, columns, out);
        default: return panel_to_fp32<TW_BFP4>(panel, columns, out);
    }
}

// Calls `make.template rows<M>(row)` for all rows, as many at a time as registers hold.
template <class Make> inline void by_tiles(int64_t num_rows, Make make) {
    int64_t row = 0;
    for (; row + kTile <= num_rows; row += kTile) make.template rows<kTile>(row);
    if constexpr (kTile > 5) if (num_rows - row == 5) return make.template rows<5>(row);
    if constexpr (kTile > 4) if (num_rows - row == 4) return make.template rows<4>(row);
    if constexpr (kTile > 3) if (num_rows - row == 3) return make.template rows<3>(row);
    if constexpr (kTile > 2) if (num_rows - row == 2) return make.template rows<2>(row);
    if constexpr (kTile > 1) if (num_rows - row == 1) return make.template rows<1>(row);
}

template <int KIND> struct MakeInt8 {
    const PanelPair& pair;
    const Operand& x;
    const Result& result;
    template <int M> void rows(int64_t row) {
        Tile<M> tile;
        clear(tile);
        tile_int8<KIND, M>(pair, x, row, tile);
        finish(tile, result, row);
    }
};

void product_int8(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result) {
    switch (pair.kind) {
        case TW_Q80: return by_tiles(num_rows, MakeInt8<TW_Q80>{pair, x, result});
        case TW_Q40: return by_tiles(num_rows, MakeInt8<TW_Q40>{pair, x, result});
        case TW_Q41: return by_tiles(num_rows, MakeInt8<TW_Q41>{pair, x, result});
        case TW_BFP8: return by_tiles(num_rows, MakeInt8<TW_BFP8>{pair, x, result});
        default: return by_tiles(num_rows, MakeInt8<TW_BFP4>{pair, x, result});
    }
}

template <int KIND> struct MakeBf16 {
    const PanelPair& pair;
    const Operand& x;
    const Result& result;
    const uint8_t* codes;
    template <int M> void rows(int64_t row) {
        const int32_t* own = (const int32_t*)((const uint8_t*)x.values + row * x.row_bytes);
        Tile<M> tile;
        clear(tile);
        if constexpr (KIND == TW_BF16)
            tile_bf16<M>({pair.first, pair.second, 64, x.num_blocks * 16}, own, x.row_bytes / 4, tile);
        else
            tile_scaled<KIND, M>(pair, codes, own, x.row_bytes / 4, tile);
        finish(tile, result, row);
    }
};

template <int KIND>
void scaled_bf16(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result, void* scratch) {
    uint8_t* codes = (uint8_t*)scratch;
    const int64_t wide = rounded(pair.columns, kBlock);
    codes_to_bf16<KIND>(pair.first, wide, codes);
    codes_to_bf16<KIND>(pair.second, wide, codes + wide * 32);
    by_tiles(num_rows, MakeBf16<KIND>{pair, x, result, codes});
}

void product_bf16(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result, void* scratch) {
    switch (pair.kind) {
        case TW_BF16: return by_tiles(num_rows, MakeBf16<TW_BF16>{pair, x, result, nullptr});
        case TW_Q80: return scaled_bf16<TW_Q80>(pair, x, num_rows, result, scratch);
        case TW_Q40: return scaled_bf16<TW_Q40>(pair, x, num_rows, result, scratch);
        case TW_BFP8: return scaled_bf16<TW_BFP8>(pair, x, num_rows, result, scratch);
        default: return scaled_bf16<TW_BFP4>(pair, x, num_rows, result, scratch);
    }
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

void product_fp32(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result, void* scratch) {
    const int64_t wide = x.num_blocks * kBlock;
    Columns w{pair.first, pair.second, 64, wide};
    if (pair.kind != TW_FP32) {
        float* values = (float*)scratch;
        to_fp32(pair.kind, pair.first, pair.columns, values);
        to_fp32(pair.kind, pair.second, pair.columns, values + wide * kLanes);
        w.first = (const uint8_t*)values;
        w.second = (const uint8_t*)(values + wide * kLanes);
    }
    by_tiles(num_rows, MakeFp32{w, x, result});
}

}  // namespace
