// Decoding of block panels for sixteen rows: scales, minimums and codes. Included once per
// translation unit, after its simd_*.h.

namespace {

using namespace tw;

alignas(16) constexpr uint8_t kIq4Values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // plus 128
alignas(64) constexpr float kNf4Values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
alignas(16) constexpr uint8_t kFp4Values[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};  // twice e2m1, plus 128

// Words with 16 rows per block.
constexpr int block_words(int kind) { return code_bits(kind); }

// Scales follow a panel's codes. `index` counts along a row.
template <int KIND> inline vf block_scales(const uint8_t* scales, int64_t padded, int64_t index) {
    if constexpr (KIND == TW_BFP8 || KIND == TW_BFP4) return of_bits(left<23>(widened(scales + index * 16)));
    if constexpr (KIND == TW_FP8 || KIND == TW_NVFP4 || KIND == TW_NF4) return load((const float*)(scales + index * 64));
    const int64_t supers = rounded(padded, kSuper) / kSuper;
    if constexpr (KIND == TW_Q6_K || KIND == TW_IQ4_XS) {
        vi small = right_signed<24>(left<24>(widened(scales + supers * 32 + index * 16)));
        return mul(float16s(scales + index * scale_length(KIND) / kSuper * 32), to_float(small));
    }
    if constexpr (KIND == TW_Q4_K || KIND == TW_Q5_K) {
        vi small = iand(widened(scales + supers * 64 + index / 2 * 48 + index % 2 * 16), ispread(63));
        return mul(float16s(scales + index / 8 * 64), to_float(small));
    }
    return float16s(scales + index * 32);
}

// The addend for every value in a block.
template <int KIND> inline vf block_minimums(const uint8_t* scales, int64_t padded, int64_t index) {
    if constexpr (KIND == TW_Q4_K || KIND == TW_Q5_K) {
        const uint8_t* at = scales + rounded(padded, kSuper) / kSuper * 64 + index / 2 * 48;
        vi low = right<6>(widened(at + index % 2 * 16)), both = left<2>(widened(at + 32));
        vi high = index % 2 ? right<4>(both) : both;
        vi small = ior(low, iand(high, ispread(60)));
        return sub(zeros(), mul(float16s(scales + index / 8 * 64 + 32), to_float(small)));
    }
    return float16s(scales + padded + index * 32);
}

// Codes for four columns. `group` is their index in a block. The block's words begin at `block`.
template <int KIND, int GROUP> inline vi four_codes(const uint8_t* block) {
    if constexpr (code_bits(KIND) == 8) return iload(block + GROUP * 64);
    vi two = iload(block + GROUP / 2 * 64);
    vi low = iand(GROUP % 2 ? right<4>(two) : two, ispread(0x0f0f0f0f));
    if constexpr (code_bits(KIND) == 5) {
        vi rest = iload(block + 256);
        if constexpr (GROUP < 4) rest = left<4 - GROUP>(rest);
        else rest = right<GROUP - 4>(rest);
        return ior(low, iand(rest, ispread(0x10101010)));
    } else if constexpr (code_bits(KIND) == 6) {
        vi rest = iload(block + 256 + GROUP / 4 * 64);
        if constexpr (GROUP % 4 < 2) rest = left<4 - 2 * (GROUP % 4)>(rest);
        else rest = right<2 * (GROUP % 4) - 4>(rest);
        return ior(low, iand(rest, ispread(0x30303030)));
    }
    if constexpr (has_codebook(KIND)) return looked_up(repeated(KIND == TW_NVFP4 ? kFp4Values : kIq4Values), low);
    return low;
}

template <int KIND, int J> inline vf code_of(vi four) {
    if constexpr (KIND == TW_NF4) return float_at(kNf4Values, iand(right<8 * J>(four), ispread(15)));
    if constexpr (has_float_codes(KIND)) {  // e4m3 fields in a float with another bias
        vi code = right<8 * J>(four);
        vi fields = ior(left<20>(iand(code, ispread(0x7f))), left<24>(iand(code, ispread(0x80))));
        return mul(of_bits(fields), spread(0x1p120f));
    }
    return to_float(iadd(iand(right<8 * J>(four), ispread(255)), ispread(-zero_of(KIND))));
}

template <int KIND, int GROUP, class Put> inline void put_four(const uint8_t* block, int64_t column, Put put) {
    vi four = four_codes<KIND, GROUP>(block);
    put(column + 4 * GROUP, code_of<KIND, 0>(four), code_of<KIND, 1>(four), code_of<KIND, 2>(four), code_of<KIND, 3>(four));
}

// Call `put(column, four values)` for every four columns of a panel.
template <int KIND, class Put> inline void each_four(const uint8_t* codes, int64_t padded, Put put) {
    for (int64_t k = 0; k < padded; k += kBlock) {
        const uint8_t* block = codes + k / kBlock * block_words(KIND) * 64;
        put_four<KIND, 0>(block, k, put);
        put_four<KIND, 1>(block, k, put);
        put_four<KIND, 2>(block, k, put);
        put_four<KIND, 3>(block, k, put);
        put_four<KIND, 4>(block, k, put);
        put_four<KIND, 5>(block, k, put);
        put_four<KIND, 6>(block, k, put);
        put_four<KIND, 7>(block, k, put);
    }
}

inline vi pair_of(vf first, vf second) {
    return ior(right<16>(bits(first)), iand(bits(second), ispread((int32_t)0xffff0000)));
}

template <int KIND> inline void codes_to_bf16(const uint8_t* panel, int64_t padded, uint8_t* out) {
    each_four<KIND>(panel, padded, [out](int64_t k, vf a, vf b, vf c, vf d) {
        istore(out + k * 32, pair_of(a, b));
        istore(out + k * 32 + 64, pair_of(c, d));
    });
}

template <int KIND> inline void panel_to_fp32(const uint8_t* panel, int64_t columns, float* out) {
    const int64_t padded = rounded(columns, kBlock);
    const uint8_t* scales = panel + panel_size(KIND, columns).codes;
    each_four<KIND>(panel, padded, [=](int64_t k, vf a, vf b, vf c, vf d) {
        const int64_t index = k / scale_length(KIND);
        vf scale = block_scales<KIND>(scales, padded, index);
        vf least = zeros();
        if constexpr (has_minimums(KIND)) least = block_minimums<KIND>(scales, padded, index);
        store(out + k * 16, add(mul(a, scale), least));
        store(out + k * 16 + 16, add(mul(b, scale), least));
        store(out + k * 16 + 32, add(mul(c, scale), least));
        store(out + k * 16 + 48, add(mul(d, scale), least));
    });
}

inline void bf16_to_fp32(const uint8_t* panel, int64_t padded, float* out) {
    for (int64_t k = 0; k < padded; k += 2) {
        vi two = iload(panel + k * 32);
        store(out + k * 16, of_bits(left<16>(two)));
        store(out + k * 16 + 16, of_bits(iand(two, ispread((int32_t)0xffff0000))));
    }
}

// A packed panel, read block by block from the start.
struct Packed {
    vi table;
    const uint8_t* groups;
    const Exception* next;
    const Exception* end;

    Packed(const uint8_t* panel, int64_t columns)
        : table(repeated(panel + kPackedTable)), groups(panel + kPackedHead),
          next((const Exception*)(panel + panel_size(kPacked, columns).codes)), end(next + *(const uint32_t*)panel) {}

    // Four pairs of columns, with 16 rows of two bfloat16 each.
    void four_pairs(int64_t group, vi (&pairs)[4]) const {
        const uint8_t* at = groups + group * kPackedGroup;
        const vi first = iload(at), second = iload(at + 64), places = iload(at + 128);
        const vi upper = looked_up(table, iand(places, ispread(0x0f0f0f0f)));
        const vi other = looked_up(table, iand(right<4>(places), ispread(0x0f0f0f0f)));
        pairs[0] = in_turns_low(first, upper);
        pairs[1] = in_turns_high(first, upper);
        pairs[2] = in_turns_low(second, other);
        pairs[3] = in_turns_high(second, other);
    }

    bool is_plain(int64_t block) const { return next == end || next->index >= (block + 1) * kBlock * kLanes; }

    // Unpack a block to BF16 panel layout, with its exceptions.
    void unpack(int64_t block, uint8_t* out) {
        for (int64_t group = 0; group < 4; group++) {
            vi pairs[4];
            four_pairs(4 * block + group, pairs);
            for (int64_t i = 0; i < 4; i++) istore(out + (4 * group + i) * 64, pairs[i]);
        }
        for (; !is_plain(block); next++) ((uint16_t*)out)[next->index % (kBlock * kLanes)] = (uint16_t)next->value;
    }
};

inline void unpack_panel(const uint8_t* panel, int64_t columns, uint8_t* out) {
    Packed packed(panel, columns);
    for (int64_t block = 0; block < rounded(columns, kBlock) / kBlock; block++) packed.unpack(block, out + block * kBlock * kLanes * 2);
}

inline void packed_to_fp32(const uint8_t* panel, int64_t columns, float* out) {
    Packed packed(panel, columns);
    alignas(64) uint8_t values[kBlock * kLanes * 2];
    for (int64_t block = 0; block < rounded(columns, kBlock) / kBlock; block++) {
        packed.unpack(block, values);
        bf16_to_fp32(values, kBlock, out + block * kBlock * kLanes);
    }
}

// Call `make.template kind<KIND>()` for a block kind.
template <class Make> inline void by_kind(int kind, Make make) {
    switch (kind) {
        case TW_Q80: return make.template kind<TW_Q80>();
        case TW_Q40: return make.template kind<TW_Q40>();
        case TW_BFP8: return make.template kind<TW_BFP8>();
        case TW_BFP4: return make.template kind<TW_BFP4>();
        case TW_Q41: return make.template kind<TW_Q41>();
        case TW_Q50: return make.template kind<TW_Q50>();
        case TW_Q51: return make.template kind<TW_Q51>();
        case TW_Q4_K: return make.template kind<TW_Q4_K>();
        case TW_Q5_K: return make.template kind<TW_Q5_K>();
        case TW_FP8: return make.template kind<TW_FP8>();
        case TW_IQ4_XS: return make.template kind<TW_IQ4_XS>();
        case TW_NVFP4: return make.template kind<TW_NVFP4>();
        case TW_NF4: return make.template kind<TW_NF4>();
        default: return make.template kind<TW_Q6_K>();
    }
}

inline void fp16_to_fp32(const uint8_t* panel, int64_t padded, float* out) {
    for (int64_t k = 0; k < padded; k++) store(out + k * 16, float16s(panel + k * 32));
}

struct ToFp32 {
    const uint8_t* panel;
    int64_t columns;
    float* out;
    template <int KIND> void kind() { panel_to_fp32<KIND>(panel, columns, out); }
};

inline void to_fp32(int kind, const uint8_t* panel, int64_t columns, float* out) {
    if (kind == kPacked) return packed_to_fp32(panel, columns, out);
    if (kind == TW_BF16) return bf16_to_fp32(panel, rounded(columns, kBlock), out);
    if (kind == TW_FP16) return fp16_to_fp32(panel, rounded(columns, kBlock), out);
    by_kind(kind, ToFp32{panel, columns, out});
}

}  // namespace
