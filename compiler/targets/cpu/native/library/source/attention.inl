// Attention for some query rows over a segment of a head's cache.
//
// Keys and values are read in chunks of 64 positions, aligned to 64. A row's sums therefore have a
// fixed order, independent of concurrent rows and prompt splits.

namespace {

using namespace tw;

constexpr int kChunk = 64;

struct AttendScratch {
    float scores[kTile][kChunk];
    alignas(64) uint8_t weights[kTile][kChunk * 4];
    const uint8_t *keys, *values;  // current chunk
    bool has_codes;                // unpacked in registers
};

// Powers of two for code exponents.
inline vf powers(const uint8_t* exponents) {
    return mul(of_bits(imax(left<23>(widened(exponents)), ispread(1 << 22))), spread(0x1p-6f));
}

#ifndef TW_OWN_CODES  // else in simd_*.h
template <int J> inline vf signed_code(vi four) { return to_float(right_signed<24>(left<24 - 8 * J>(four))); }
#endif

template <int M>
inline void add_fresh(vf (&sums)[M][panels<M>()], int p, FreshPair w, const PairWord* x, int64_t x_row) {
TW_UNROLL
    for (int m = 0; m < M; m++) sums[m][p] = dot_fresh(sums[m][p], w, x + m * x_row);
}

// Multiply by 32 block keys from position `group` * 16. Keys are unpacked in registers.
template <int M>
inline void dot_keys(const uint8_t* keys, int64_t dim, int64_t group, const PairWord* x, int64_t x_row, Tile<M>& tile) {
    for (int first = 0; first < 2; first += panels<M>()) {
        vf sums[M][panels<M>()];
        take<M>(sums, tile, first);
        const uint8_t* codes = keys + (group + first) * dim * 16;
        const uint8_t* exponents = keys + kChunk * dim + (group + first) * dim;
        for (int64_t part = 0; part < dim / 16; part++) {
            vf power[panels<M>()];
            for (int p = 0; p < panels<M>(); p++) power[p] = powers(exponents + p * dim + part * 16);
            for (int64_t four = 4 * part; four < 4 * part + 4; four++) {
                const PairWord* own = x + 2 * four * kPairWords;
                for (int p = 0; p < panels<M>(); p++) {
                    const vi all = iload(codes + p * dim * 16 + four * 64);
                    add_fresh<M>(sums, p, fresh_pair(mul(signed_code<0>(all), power[p]), mul(signed_code<1>(all), power[p])), own, x_row);
                    add_fresh<M>(sums, p, fresh_pair(mul(signed_code<2>(all), power[p]), mul(signed_code<3>(all), power[p])), own + kPairWords, x_row);
                }
            }
        }
        give<M>(sums, tile, first);
    }
}

// Multiply by `num_pairs` pairs of block values, with 16 channels from `channels[0]` and from
// `channels[1]`.
template <int M>
inline void dot_values(const uint8_t* values, int64_t dim, const int64_t (&channels)[2], int64_t num_pairs, const PairWord* x, Tile<M>& tile) {
    for (int first = 0; first < 2; first += panels<M>()) {
        float power[panels<M>()][kChunk];
        for (int p = 0; p < panels<M>(); p++)
            for (int64_t i = 0; i < 2 * num_pairs; i += kLanes) store(power[p] + i, powers(values + (dim + channels[first + p] / 16) * kChunk + i));
        vf sums[M][panels<M>()];
        take<M>(sums, tile, first);
        for (int64_t pair = 0; pair < num_pairs; pair += 2)
            for (int p = 0; p < panels<M>(); p++) {
                const vi all = iload(values + (pair / 2 * dim + channels[first + p]) * 4);
                const float* own = power[p] + 2 * pair;
                add_fresh<M>(sums, p, fresh_pair(mul(signed_code<0>(all), spread(own[0])), mul(signed_code<1>(all), spread(own[1]))), x + pair * kPairWords, kChunk);
                if (pair + 1 == num_pairs) continue;
                add_fresh<M>(sums, p, fresh_pair(mul(signed_code<2>(all), spread(own[2])), mul(signed_code<3>(all), spread(own[3]))), x + (pair + 1) * kPairWords, kChunk);
            }
        give<M>(sums, tile, first);
    }
}

template <int M>
inline void dot_products(const HeadCache& cache, const Columns& w, const void* x, int64_t x_row, Tile<M>& tile) {
    if (cache.is_bf16) tile_bf16<M>(w, (const PairWord*)x, x_row, tile);
    else tile_fp32<M>(w, (const float*)x, x_row, tile);
}

template <int M> struct Running {
    float largest[M];
    vf sum[M];
};

// A tile's visible positions, and the positions visible to all its rows.
struct Visible {
    int32_t begin, end, all_begin, all_end;

    template <int M> static Visible of(const Queries& rows, int64_t row) {
        Visible found{rows.begins[row], rows.ends[row], rows.begins[row], rows.ends[row]};
        for (int64_t m = row + 1; m < row + M; m++) {
            found.begin = rows.begins[m] < found.begin ? rows.begins[m] : found.begin;
            found.end = rows.ends[m] > found.end ? rows.ends[m] : found.end;
            found.all_begin = rows.begins[m] > found.all_begin ? rows.begins[m] : found.all_begin;
            found.all_end = rows.ends[m] < found.all_end ? rows.ends[m] : found.all_end;
        }
        return found;
    }
};

// Compute masked scores for `count` positions from `at`.
template <int M>
inline void score(const HeadCache& cache, const Queries& rows, int64_t row, int32_t at, int32_t count, const Visible& visible, AttendScratch& scratch) {
    const int64_t dim = cache.head_dim, per_column = cache.is_bf16 ? 2 : 1, width = cache.is_bf16 ? 2 : 4;
    const int64_t words = cache.is_bf16 ? dim / 2 * kPairWords : dim;  // of a query row
    const uint8_t* q = (const uint8_t*)rows.q + row * words * 4;
    const int64_t block = dim * width * 16;
    const float places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int two = 0; 32 * two < count; two++) {
        const int32_t from = at + 32 * two;
        const uint8_t* keys = scratch.keys + 2 * two * block;
        Tile<M> tile;
        clear(tile);
        if (scratch.has_codes) dot_keys<M>(scratch.keys, dim, 2 * two, (const PairWord*)q, words, tile);
        else dot_products<M>(cache, {keys, keys + block, 64, dim / per_column}, q, words, tile);
        const bool is_masked = from < visible.all_begin || from + 32 > visible.all_end;
        for (int m = 0; m < M; m++) {
            float* to = scratch.scores[m] + two * 32;
            for (int half = 0; half < 2; half++) {
                vf s = mul(tile.at[m][half], spread(rows.scale));
                if (rows.soft_cap > 0.0f)
                    s = mul(tangent(div(s, spread(rows.soft_cap))), spread(rows.soft_cap));
                if (is_masked) {
                    vf place = add(load(places), spread((float)(from + half * 16)));
                    s = if_less(place, spread((float)rows.ends[row + m]), s, spread(-__builtin_inff()));
                    s = if_less(place, spread((float)rows.begins[row + m]), spread(-__builtin_inff()), s);
                }
                store(to + half * 16, s);
            }
        }
    }
}

// Compute exponentials for `count` scores, as matmul operands, and the factors for earlier sums.
template <int M>
inline void weigh(const HeadCache& cache, int32_t count, Running<M>& running, AttendScratch& scratch, float (&kept)[kLanes]) {
    float shifts[M], changes[kLanes] = {};
    for (int m = 0; m < M; m++) {
        const float* s = scratch.scores[m];
        vf two = larger(load(s), load(s + 16));
        if (count > 32) two = larger(two, larger(load(s + 32), load(s + 48)));
        float most = largest_of(two);
        most = most > running.largest[m] ? most : running.largest[m];
        // no visible position yet: any finite shift works, because all exponentials are 0
        shifts[m] = most == -__builtin_inff() ? 0.0f : most;
        changes[m] = most == running.largest[m] ? 0.0f : running.largest[m] - shifts[m];
        running.largest[m] = most;
    }
    store(kept, exponential(load(changes)));
    for (int m = 0; m < M; m++) {
        vf sum = zeros(), shift = spread(shifts[m]);
        for (int i = 0; 16 * i < count; i++) {
            vf p = exponential(sub(load(scratch.scores[m] + 16 * i), shift));
            sum = add(sum, p);
            if (cache.is_bf16) store_pair_words(scratch.weights[m], i, as_bf16(p), rounded_to_bf16(p));
            else store((float*)scratch.weights[m] + 16 * i, p);
        }
        running.sum[m] = fma(running.sum[m], spread(kept[m]), sum);
    }
}

// values = values * kept + weights x cached values, for `count` positions from `at`
template <int M>
inline void gather_values(const HeadCache& cache, const Partial& partial, int64_t row, int32_t count, const AttendScratch& scratch, const float* kept) {
    const int64_t dim = cache.head_dim;
    const int64_t step = dim * 4, positions = cache.is_bf16 ? 2 : 1;
    for (int64_t d = 0; d < dim; d += 32) {
        bool both = d + 16 < dim;
        Tile<M> tile;
        for (int m = 0; m < M; m++) {
            const float* from = partial.values + (row + m) * dim + d;
            tile.at[m][0] = mul(load(from), spread(kept[m]));
            tile.at[m][1] = both ? mul(load(from + 16), spread(kept[m])) : zeros();
        }
        const uint8_t* first = scratch.values + d * 4;
        Columns w{first, both ? first + 64 : first, step, (count + positions - 1) / positions};
        if (scratch.has_codes) dot_values<M>(scratch.values, dim, {d, both ? d + 16 : d}, w.count, (const PairWord*)scratch.weights[0], tile);
        else dot_products<M>(cache, w, scratch.weights[0], kChunk, tile);
        for (int m = 0; m < M; m++) {
            float* to = partial.values + (row + m) * dim + d;
            store(to, tile.at[m][0]);
            if (both) store(to + 16, tile.at[m][1]);
        }
    }
}

// Convert a block key chunk to bfloat16. The conversion is exact.
inline void unpack_keys(const uint8_t* keys, int64_t dim, uint8_t* to) {
    const uint8_t* exponents = keys + kChunk * dim;
    for (int64_t part = 0; part < kChunk / 16 * (dim / 16); part++) {
        const vf power = powers(exponents + part * 16);
        for (int64_t four = 4 * part; four < 4 * part + 4; four++) {
            const vi codes = iload(keys + four * 64);
            istore(to + four * 128, pair_of(mul(signed_code<0>(codes), power), mul(signed_code<1>(codes), power)));
            istore(to + four * 128 + 64, pair_of(mul(signed_code<2>(codes), power), mul(signed_code<3>(codes), power)));
        }
    }
}

// Convert the first `count` positions in a block value chunk, in whole fours.
inline void unpack_values(const uint8_t* values, int64_t dim, int32_t count, uint8_t* to) {
    const uint8_t* exponents = values + kChunk * dim;
    for (int64_t part = 0; part < dim / 16; part++) {
        float power[kChunk];
        for (int i = 0; i < kChunk; i += 16) store(power + i, powers(exponents + part * kChunk + i));
        for (int64_t four = 0; 4 * four < count; four++) {
            const vi codes = iload(values + (four * dim + 16 * part) * 4);
            const float* own = power + 4 * four;
            uint8_t* out = to + (2 * four * dim + 16 * part) * 4;
            istore(out, pair_of(mul(signed_code<0>(codes), spread(own[0])), mul(signed_code<1>(codes), spread(own[1]))));
            istore(out + dim * 4, pair_of(mul(signed_code<2>(codes), spread(own[2])), mul(signed_code<3>(codes), spread(own[3]))));
        }
    }
}

inline void ask_for(const uint8_t* from, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(from + at, 0, 1);
}

struct Attend {
    const HeadCache& cache;
    const Queries& queries;
    int32_t begin, end;
    const Partial& partial;
    AttendScratch& scratch;
    int32_t unpacked = begin;  // positions before are unpacked

    // A single tile of rows reads codes, more tiles share their values.
    void take(int32_t at) {
        scratch.keys = cache.keys + at / kChunk * cache.step;
        scratch.values = cache.values + at / kChunk * cache.step;
        scratch.has_codes = cache.unpacked && queries.num_rows <= kTile;
        if (!cache.unpacked || scratch.has_codes) return;
        const int64_t bytes = kChunk * (int64_t)cache.head_dim * 2;
        uint8_t* to = cache.unpacked + (at - begin) / kChunk * 2 * bytes;
        if (at >= unpacked) {
            unpack_keys(scratch.keys, cache.head_dim, to);
            // The last row sees the most positions.
            const int32_t count = queries.ends[queries.num_rows - 1] - at;
            unpack_values(scratch.values, cache.head_dim, count < kChunk ? count : kChunk, to + bytes);
            unpacked = at + kChunk;
        }
        scratch.keys = to;
        scratch.values = to + bytes;
    }

    template <int M> void rows(int64_t row) {
        Running<M> running;
        for (int m = 0; m < M; m++) {
            running.largest[m] = -__builtin_inff();
            running.sum[m] = zeros();
            float* values = partial.values + (row + m) * cache.head_dim;
            for (int64_t d = 0; d < cache.head_dim; d += 16) store(values + d, zeros());
        }
        const Visible visible = Visible::of<M>(queries, row);
        const int32_t first = visible.begin < begin ? begin : visible.begin / kChunk * kChunk;
        const int32_t last = visible.end > end ? end : visible.end;
        for (int32_t at = first; at < last; at += kChunk) {
            float kept[kLanes];
            const int32_t count = last - at < kChunk ? last - at : kChunk, whole = count > 32 ? kChunk : 32;
            const uint8_t* next = row ? nullptr : at + kChunk < last ? cache.keys + (at / kChunk + 1) * cache.step : cache.next;
            if (next) ask_for(next, cache.chunk_bytes);
            take(at);
            score<M>(cache, queries, row, at, whole, visible, scratch);
            weigh<M>(cache, whole, running, scratch, kept);
            if (next) ask_for(next + cache.chunk_bytes, cache.chunk_bytes);
            gather_values<M>(cache, partial, row, count, scratch, kept);
        }
        for (int m = 0; m < M; m++) {
            partial.largest[row + m] = running.largest[m];
            partial.sum[row + m] = sum_of(running.sum[m]);
        }
    }
};

void attend(const HeadCache& cache, const Queries& queries, int32_t begin, int32_t end, const Partial& partial) {
    AttendScratch scratch;
    const Attend attend{cache, queries, begin, end, partial, scratch};
    if (cache.is_bf16) return by_tiles<kTile>(queries.num_rows, attend);
    by_tiles<kPairRows>(queries.num_rows, attend);
}

}  // namespace
