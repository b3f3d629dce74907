// Matmuls between many int8 rows and a panel pair with 8-bit codes, on AVX2. Included once, after
// products.inl.
//
// AVX2 multiplies unsigned by signed bytes and adds neighbors in 16 bits. Two products fit if the
// unsigned operand is a magnitude. Rows therefore have magnitudes and signs. A column pair's sign
// is a factor for its sum. The relative sign in a pair selects a weight copy, from a table per
// block. Making a table pays for many rows only.

namespace {

using namespace tw;

constexpr int64_t kSignedChunk = 128;  // rows whose sums stay in the nearest cache

constexpr int kCopies = 4, kCopyBytes = 128, kGroupBytes = kCopies * kCopyBytes, kTableBytes = 8 * kGroupBytes;

// A row's block. Every four columns have magnitudes, and an offset to a copy and to pair signs.
struct alignas(64) SignedBlock {
    uint32_t sizes[8];
    uint16_t offsets[8];
    float scales[2];
};

// Signs for two column pairs, at a group's offset.
struct PairSigns {
    alignas(64) int16_t words[kCopies][4][16];
    constexpr PairSigns() : words{} {
        for (int copy = 0; copy < kCopies; copy++)
            for (int pairs = 0; pairs < 4; pairs++)
                for (int i = 0; i < 16; i++) words[copy][pairs][i] = pairs >> i % 2 & 1 ? -1 : 1;
    }
};
constexpr PairSigns kPairSigns;
static_assert(sizeof kPairSigns == kGroupBytes);

struct Offsets {
    uint16_t of[16];  // by the signs in four columns
    constexpr Offsets() : of{} {
        for (int four = 0; four < 16; four++) {
            const int copy = ((four ^ four >> 1) & 1) | ((four >> 1 ^ four >> 2) & 2), pairs = (four & 1) | (four >> 1 & 2);
            of[four] = (uint16_t)(copy * kCopyBytes + pairs * 32);
        }
    }
};
constexpr Offsets kOffsets;

// A chunk stores all rows for a block, then all rows for the next block.
inline int64_t signed_index(int64_t block, int64_t row, int64_t num_rows, int64_t num_blocks) {
    const int64_t first = row / kSignedChunk * kSignedChunk;
    const int64_t count = num_rows - first < kSignedChunk ? num_rows - first : kSignedChunk;
    return first * num_blocks + block * count + row - first;
}

void quantise_signed(const float* x, int64_t columns, int32_t kind, void* rows, int64_t row, int64_t num_rows) {
    const int64_t num_blocks = rounded(columns, kBlock) / kBlock;
    for (int64_t block = 0; block < num_blocks; block++) {
        SignedBlock& to = ((SignedBlock*)rows)[signed_index(block, row, num_rows, num_blocks)];
        codes_of_block(x + block * kBlock, columns - block * kBlock, scale_length(kind), to.scales, [&](int half, const int8_t* codes) {
            const __m128i values = _mm_loadu_si128((const __m128i*)codes);
            _mm_store_si128((__m128i*)(to.sizes + 4 * half), _mm_abs_epi8(values));
            const int signs = _mm_movemask_epi8(values);
            for (int group = 0; group < 4; group++) to.offsets[4 * half + group] = kOffsets.of[signs >> 4 * group & 15];
        });
    }
}

// Store four copies: unchanged, and with negated second, fourth, or both columns.
inline void put_copies(uint8_t* table, __m256i bytes) {
    _mm256_store_si256((__m256i*)table, bytes);
    _mm256_store_si256((__m256i*)(table + kCopyBytes), _mm256_sign_epi8(bytes, _mm256_set1_epi32(0x0101ff01)));
    _mm256_store_si256((__m256i*)(table + 2 * kCopyBytes), _mm256_sign_epi8(bytes, _mm256_set1_epi32((int32_t)0xff010101)));
    _mm256_store_si256((__m256i*)(table + 3 * kCopyBytes), _mm256_sign_epi8(bytes, _mm256_set1_epi32((int32_t)0xff01ff01)));
}

// Read codes for groups from GROUP on. Return a mask for bytes with a zero code.
template <int KIND, int GROUP = 0> inline __m256i read_codes(const uint8_t* first, const uint8_t* second, __m256i (&codes)[8][4]) {
    const vi one = four_codes<KIND, GROUP>(first), two = four_codes<KIND, GROUP>(second);
    const __m256i own[4] = {one.a, one.b, two.a, two.b}, zero = _mm256_setzero_si256();
    __m256i found = zero;
    if constexpr (GROUP < 7) found = read_codes<KIND, GROUP + 1>(first, second, codes);
    for (int i = 0; i < 4; i++) {
        codes[GROUP][i] = own[i];
        found = _mm256_or_si256(found, _mm256_cmpeq_epi8(own[i], zero));
    }
    return found;
}

// Make a block's tables and return their number. A zero code is -128 and has no negative byte. A
// block with this code has two tables, for two addends.
template <int KIND> inline int make_tables(const uint8_t* first, const uint8_t* second, uint8_t (&tables)[2][kTableBytes]) {
    __m256i codes[8][4];
    const __m256i found = read_codes<KIND>(first, second, codes);
    const bool is_split = !_mm256_testz_si256(found, found);
    const __m256i zero_code = _mm256_set1_epi8((char)0x80), half_code = _mm256_set1_epi8(64);
    for (int group = 0; group < 8; group++)
        for (int i = 0; i < 4; i++) {
            const int64_t at = group * kGroupBytes + i * 32;
            const __m256i code = codes[group][i];
            if (!is_split) {
                put_copies(tables[0] + at, _mm256_xor_si256(code, zero_code));
                continue;
            }
            const __m256i half = _mm256_and_si256(_mm256_srli_epi16(code, 1), _mm256_set1_epi8(127));
            put_copies(tables[0] + at, _mm256_sub_epi8(half, half_code));
            put_copies(tables[1] + at, _mm256_sub_epi8(_mm256_sub_epi8(code, half), half_code));
        }
    return 1 + is_split;
}

inline void add_dots(vi& dots, __m256i sizes, const __m256i* w, __m256i signs) {
    dots.a = _mm256_add_epi32(dots.a, _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, w[0]), signs));
    dots.b = _mm256_add_epi32(dots.b, _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, w[1]), signs));
    asm("" : "+x"(dots.a), "+x"(dots.b));  // keeps the order: compilers spill reordered terms
}

template <int PARTS> using PartScales = vf[PARTS][2];

// Add a block's products to the sums for `num_rows` rows. A part has a scale.
template <int PARTS, int TABLES>
inline void add_signed(const uint8_t (&tables)[2][kTableBytes], const SignedBlock* x, int64_t num_rows, const PartScales<PARTS>& scales, Tile<1>* sums) {
    for (const SignedBlock* end = x + num_rows; x != end; x++, sums++) {
TW_UNROLL
        for (int part = 0; part < PARTS; part++) {
            vi one = ispread(0), two = ispread(0);  // panels
            for (int table = 0; table < TABLES; table++) {
TW_UNROLL
                for (int group = part * 8 / PARTS; group < (part + 1) * 8 / PARTS; group++) {
                    const int64_t offset = x->offsets[group];
                    const __m256i size = _mm256_set1_epi32((int32_t)x->sizes[group]);
                    const __m256i signs = *(const __m256i*)((const uint8_t*)kPairSigns.words + offset);
                    const __m256i* w = (const __m256i*)(tables[table] + group * kGroupBytes + offset / kCopyBytes * kCopyBytes);
                    add_dots(one, size, w, signs);
                    add_dots(two, size, w + 2, signs);
                }
            }
            const vf scale = spread(x->scales[part]);
            sums->at[0][0] = fma(mul(to_float(one), scales[part][0]), scale, sums->at[0][0]);
            sums->at[0][1] = fma(mul(to_float(two), scales[part][1]), scale, sums->at[0][1]);
        }
    }
}

template <int KIND> inline void product_signed(const PanelPair& pair, const Operand& x, int64_t num_rows, const Result& result) {
    constexpr int kParts = kBlock / scale_length(KIND);
    alignas(64) uint8_t tables[2][kTableBytes];
    alignas(64) Tile<1> sums[kSignedChunk];
    const PanelSize size = panel_size(KIND, pair.columns);
    const int64_t padded = x.num_blocks * kBlock;
    for (int64_t first = 0; first < num_rows; first += kSignedChunk) {
        const int64_t count = num_rows - first < kSignedChunk ? num_rows - first : kSignedChunk;
        for (int64_t row = 0; row < count; row++) clear(sums[row]);
        for (int64_t block = 0; block < x.num_blocks; block++) {
            if (!first) fetch(pair, block);
            const int64_t at = block * block_words(KIND) * 64;
            const int num_tables = make_tables<KIND>(pair.first + at, pair.second + at, tables);
            const SignedBlock* rows = (const SignedBlock*)x.values + first * x.num_blocks + block * count;
            PartScales<kParts> scales;
            for (int part = 0; part < kParts; part++) {
                scales[part][0] = block_scales<KIND>(pair.first + size.codes, padded, block * kParts + part);
                scales[part][1] = block_scales<KIND>(pair.second + size.codes, padded, block * kParts + part);
            }
            if (num_tables == 1) add_signed<kParts, 1>(tables, rows, count, scales, sums);
            else add_signed<kParts, 2>(tables, rows, count, scales, sums);
        }
        for (int64_t row = 0; row < count; row++) finish(sums[row], result, first + row);
    }
}

}  // namespace
