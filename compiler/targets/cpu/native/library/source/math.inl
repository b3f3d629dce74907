// Elementwise arithmetic and norms over simd_*.h lanes, with equal order on all instruction sets.

namespace {

using namespace tw;

// e ** x within 2 units in the last place. 0 below -87. NaN stays NaN.
inline vf exponential(vf x) {
    vf clamped = smaller(spread(88.0f), larger(spread(-87.5f), x));
    vi n = nearest(mul(clamped, spread(1.44269504f)));
    vf count = to_float(n);
    vf r = fma(count, spread(-0.693359375f), clamped);
    r = fma(count, spread(2.12194440e-4f), r);
    vf p = spread(1.0f / 720.0f);
    p = fma(p, r, spread(1.0f / 120.0f));
    p = fma(p, r, spread(1.0f / 24.0f));
    p = fma(p, r, spread(1.0f / 6.0f));
    p = fma(p, r, spread(0.5f));
    p = fma(p, r, spread(1.0f));
    p = fma(p, r, spread(1.0f));
    return zero_if_less(x, spread(-87.0f), of_bits(iadd(bits(p), left<23>(n))));
}

inline vf sigmoid(vf x) {
    return div(spread(1.0f), add(spread(1.0f), exponential(sub(zeros(), x))));
}

// A NaN stays NaN.
inline vf at_most(vf x, vf limit) { return if_less(limit, x, limit, x); }

inline vf clamped_silu_times(vf gate, vf up, float limit, float alpha) {
    const vf least = spread(-limit);
    gate = at_most(gate, spread(limit));
    up = at_most(up, spread(limit));
    up = if_less(up, least, least, up);
    return mul(add(up, spread(1.0f)), mul(gate, sigmoid(mul(gate, spread(alpha)))));
}

inline vf silu_times(vf gate, vf up) {
    return mul(div(gate, add(spread(1.0f), exponential(sub(zeros(), gate)))), up);
}

inline vf tangent(vf x) {  // hyperbolic
    vf twice = exponential(add(x, x));
    return sub(spread(1.0f), div(spread(2.0f), add(twice, spread(1.0f))));
}

inline float sum_of(vf x) {
    x = add(x, shifted<8>(x));
    x = add(x, shifted<4>(x));
    x = add(x, shifted<2>(x));
    return first_lane(add(x, shifted<1>(x)));
}

inline float largest_of(vf x) {
    x = larger(x, shifted<8>(x));
    x = larger(x, shifted<4>(x));
    x = larger(x, shifted<2>(x));
    return first_lane(larger(x, shifted<1>(x)));
}

// Call `make(at, lanes)` for sixteen values at a time. The last call may have fewer.
template <class Make> inline void by_lanes(int64_t count, Make make) {
    int64_t at = 0;
    for (; at + kLanes <= count; at += kLanes) make(at, kLanes);
    if (at < count) make(at, (int)(count - at));
}

inline vf load_some(const float* p, int count);
inline void store_some(float* p, vf x, int count, bool adds, bool rounds = false);

void norm(const float* x, const float* weight, float eps, int64_t count, float* out) {
    vf squares = zeros();
    by_lanes(count, [&](int64_t at, int lanes) {
        vf v = load_some(x + at, lanes);
        squares = fma(v, v, squares);
    });
    vf scale = spread(1.0f / __builtin_sqrtf(sum_of(squares) / (float)count + eps));
    by_lanes(count, [&](int64_t at, int lanes) {
        vf v = mul(load_some(x + at, lanes), scale);
        store_some(out + at, mul(v, load_some(weight + at, lanes)), lanes, false);
    });
}

// Maximum magnitude as integer bits, which order like floats. NaN is the largest.
inline float most_of(vi x) {
    x = imax(x, bits(shifted<8>(of_bits(x))));
    x = imax(x, bits(shifted<4>(of_bits(x))));
    x = imax(x, bits(shifted<2>(of_bits(x))));
    return first_lane(of_bits(imax(x, bits(shifted<1>(of_bits(x))))));
}

// The word with which dot products begin, for values with this sum. See BlockTerms.
inline int32_t start_of(int32_t kind, int32_t sum) {
    if (has_minimums(kind)) return (int32_t)__builtin_bit_cast(uint32_t, (float)sum);
    return start_word(has_byte_codes(kind) ? 8 : code_bits(kind), -zero_of(kind) * sum);
}

// int8 in blocks of 16 or 32, as in the weight: scale = largest magnitude / 127, ties to even. A
// value that is not finite makes the block's scale not finite. `count` values are left at `x`. Call
// `put(half, codes)` for every 16 values.
template <class Put> inline void codes_of_block(const float* x, int64_t count, int64_t length, float* scales, Put put) {
    vf v[2] = {load_some(x, (int)(count < 16 ? count : 16)), zeros()};
    if (count > 16) v[1] = load_some(x + 16, (int)(count < 32 ? count - 16 : 16));
    const vi magnitude = ispread(0x7fffffff);
    const vi first = iand(bits(v[0]), magnitude), second = iand(bits(v[1]), magnitude);
    float most[2];
    most[0] = most_of(length == kBlock ? imax(first, second) : first);
    most[1] = length == kBlock ? most[0] : most_of(second);
    for (int half = 0; half < 2; half++) {
        int8_t codes[16];
        scales[half] = most[half] / 127.0f;
        vf inverse = spread(most[half] > 0.0f ? 127.0f / most[half] : 0.0f);
        store_bytes(codes, nearest(mul(v[half], inverse)));
        put(half, codes);
    }
}

void quantise(const float* x, int64_t columns, int32_t kind, void* q, BlockTerms* terms) {
    const int64_t length = scale_length(kind);
    for (int64_t block = 0; block * kBlock < columns; block++) {
        int32_t sums[2] = {0, 0};
        codes_of_block(x + block * kBlock, columns - block * kBlock, length, terms[block].scales, [&](int half, const int8_t* codes) {
            sums[half] = sum_of_codes(codes);
            put_codes(q, 2 * block + half, codes, has_byte_codes(kind));
        });
        for (int half = 0; half < 2; half++)
            terms[block].starts[half] = start_of(kind, length == kBlock ? sums[0] + sums[1] : sums[half]);
    }
}

inline vi upper_rounded(vf x) {  // a bfloat16 in the upper halves; to nearest, halves to even
    vi u = bits(x);
    return iadd(iadd(u, ispread(0x7fff)), iand(right<16>(u), ispread(1)));
}

inline vi rounded_to_bf16(vf x) { return right<16>(upper_rounded(x)); }

inline vf as_bf16(vf x) { return of_bits(iand(upper_rounded(x), ispread((int32_t)0xffff0000))); }

void round_bf16(float* x, int64_t count) {
    by_lanes(count, [=](int64_t at, int lanes) { store_some(x + at, load_some(x + at, lanes), lanes, false, true); });
}

// Pad with zeros to whole blocks of 32.
void to_bf16(const float* x, int64_t count, uint16_t* out) {
    for (int64_t at = 0; at < rounded(count, kBlock); at += kLanes) {
        int lanes = (int)(count - at < 0 ? 0 : count - at < 16 ? count - at : 16);
        store_halves(out + at, rounded_to_bf16(lanes ? load_some(x + at, lanes) : zeros()));
    }
}

void halves(const float* x, int64_t count, uint16_t* out) {
    by_lanes(count, [=](int64_t at, int lanes) {
        uint16_t whole[kLanes];
        store_halves(lanes < kLanes ? whole : out + at, rounded_to_bf16(load_some(x + at, lanes)));
        if (lanes < kLanes) __builtin_memcpy(out + at, whole, lanes * 2);
    });
}

// Rotate channel pairs, `num_pairs` apart, in place.
void turn(float* x, const float* cosines, const float* sines, int64_t num_pairs) {
    by_lanes(num_pairs, [=](int64_t at, int lanes) {
        vf a = load_some(x + at, lanes), b = load_some(x + num_pairs + at, lanes);
        vf cosine = load_some(cosines + at, lanes), sine = load_some(sines + at, lanes);
        store_some(x + at, sub(mul(a, cosine), mul(b, sine)), lanes, false);
        store_some(x + num_pairs + at, add(mul(b, cosine), mul(a, sine)), lanes, false);
    });
}

// + 0: a negative zero would depend on concurrent rows
void divide(const float* x, float by, int64_t count, float* out) {
    by_lanes(count, [=](int64_t at, int lanes) {
        store_some(out + at, add(div(load_some(x + at, lanes), spread(by)), zeros()), lanes, false);
    });
}

void swiglu(const float* gate, const float* up, int64_t count, float* out) {
    by_lanes(count, [=](int64_t at, int lanes) {
        store_some(out + at, silu_times(load_some(gate + at, lanes), load_some(up + at, lanes)), lanes, false);
    });
}

void sigmoid_gate(const float* x, const float* gate, int64_t count, bool one, float* out) {
    by_lanes(count, [=](int64_t at, int lanes) {
        vf g = one ? spread(gate[0]) : load_some(gate + at, lanes);
        store_some(out + at, mul(load_some(x + at, lanes), sigmoid(g)), lanes, false);
    });
}

inline vf gelu(vf x) {  // with erf, lane by lane
    float v[16];
    store(v, x);
    for (int i = 0; i < 16; i++) v[i] = 0.5f * v[i] * (1.0f + __builtin_erff(v[i] * 0.70710678f));
    return load(v);
}

inline vf gelu_tanh(vf x) {
    vf inner = mul(spread(0.79788456f), fma(mul(mul(x, x), x), spread(0.044715f), x));
    return mul(mul(spread(0.5f), x), add(spread(1.0f), tangent(inner)));
}

// If `y` is null, `number` is the second operand.
void function(int32_t which, const float* x, const float* y, float number, int64_t count, float* out) {
    by_lanes(count, [=](int64_t at, int lanes) {
        vf a = load_some(x + at, lanes), b = y ? load_some(y + at, lanes) : spread(number), r = a;
        switch (which) {
            case TW_ADD: r = add(a, b); break;
            case TW_MUL: r = mul(a, b); break;
            case TW_DIV: r = div(a, b); break;
            case TW_TANH: r = tangent(a); break;
            case TW_GELU: r = gelu(a); break;
            default: r = gelu_tanh(a);
        }
        store_some(out + at, r, lanes, false);
    });
}

// into = into * old + values * own
void blend(float old, float own, const float* values, int64_t count, float* into) {
    by_lanes(count, [=](int64_t at, int lanes) {
        vf kept = mul(load_some(into + at, lanes), spread(old));
        store_some(into + at, fma(load_some(values + at, lanes), spread(own), kept), lanes, false);
    });
}

// Round a block of tiny values: its powers of two are not normal floats.
inline void round_tiny(float* x, int count, int shared, int bits) {
    const double most = (1 << bits) - 1;
    for (int i = 0; i < count; i++) {
        double code = __builtin_trunc(__builtin_ldexp((double)x[i], 150 - shared));
        code = __builtin_nearbyint(__builtin_ldexp(code, bits - 24));
        code = code > most ? most : code < -most ? -most : code;
        x[i] = (float)__builtin_ldexp(code, shared - 126 - bits);
    }
}

// Round to block floats with an exponent per 16 values, like the formats on the host: drop shifted
// bits, then round to nearest, ties to even, with saturation. Values that are not finite are
// unchanged.
void round_blocks(float* x, int64_t count, int32_t num_bits) {
    const vf most = spread((float)((1 << num_bits) - 1));
    by_lanes(count, [=](int64_t at, int lanes) {
        vf v = load_some(x + at, lanes);
        int32_t all[16], largest = 0;
        istore(all, iand(bits(v), ispread(0x7fffffff)));
        for (int i = 0; i < 16; i++) largest = all[i] > largest ? all[i] : largest;
        const int32_t shared = largest >> 23;
        if (shared == 255) return;
        if (shared < 24) return round_tiny(x + at, lanes, shared, num_bits);
        vi aligned = truncated(mul(v, of_bits(ispread((277 - shared) << 23))));
        vf code = to_float(nearest(mul(to_float(aligned), of_bits(ispread((103 + num_bits) << 23)))));
        code = larger(sub(zeros(), most), if_less(most, code, most, code));
        store_some(x + at, mul(code, of_bits(ispread((shared + 1 - num_bits) << 23))), lanes, false);
    });
}

// Convert values rounded to 7 bits to signed codes and exponents per 16. In a block with a value
// that is not finite, codes of 0 become NaN and other codes infinite.
void to_blocks(float* x, int64_t count, int8_t* codes, uint8_t* exponents) {
    for (int64_t at = 0; at < count; at += kLanes) {
        const vf v = load(x + at);
        int32_t all[16], largest = 0;
        istore(all, iand(bits(v), ispread(0x7fffffff)));
        for (int i = 0; i < 16; i++) largest = all[i] > largest ? all[i] : largest;
        const int32_t shared = largest >> 23;
        exponents[at / kLanes] = (uint8_t)shared;
        if (shared >= 6 && shared < 255) {
            store_bytes(codes + at, nearest(mul(v, of_bits(ispread((260 - shared) << 23)))));
            continue;
        }
        for (int i = 0; i < 16; i++) {
            const float value = x[at + i];
            if (shared < 6) codes[at + i] = (int8_t)__builtin_ldexp((double)value, 133 - shared);
            else codes[at + i] = value > 0.0f ? 1 : value < 0.0f ? -1 : 0;
        }
    }
}

}  // namespace
