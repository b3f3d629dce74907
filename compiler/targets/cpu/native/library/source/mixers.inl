// Arithmetic for experts and linear attention, over lanes. Included after math.inl and
// products.inl.

namespace {

using namespace tw;

// A NaN makes all results NaN.
void softmax(const float* x, int64_t count, float* out) {
    float most = x[0];
    for (int64_t i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    vf sums = zeros();
    by_lanes(count, [&](int64_t at, int lanes) {
        float whole[kLanes] = {};
        store(whole, exponential(sub(load_some(x + at, lanes), spread(most))));
        for (int i = lanes; i < kLanes; i++) whole[i] = 0.0f;
        sums = add(sums, load(whole));
        store_some(out + at, load(whole), lanes, false);
    });
    vf sum = spread(sum_of(sums));
    by_lanes(count, [&](int64_t at, int lanes) { store_some(out + at, div(load_some(out + at, lanes), sum), lanes, false); });
}

// out = the weighted sum of values with a distance of `stride`, in order.
void weigh(const float* values, const float* weights, int64_t num_values, int64_t stride, int64_t count, float* out) {
    by_lanes(count, [=](int64_t at, int lanes) {
        vf sum = zeros();
        for (int64_t i = 0; i < num_values; i++)
            sum = fma(load_some(values + i * stride + at, lanes), spread(weights[i]), sum);
        store_some(out + at, sum, lanes, false);
    });
}

// Scale a vector to length `factor`. The model defines the epsilon.
void unit(const float* x, int64_t count, float factor, float* out) {
    vf squares = zeros();
    by_lanes(count, [&](int64_t at, int lanes) {
        vf v = load_some(x + at, lanes);
        squares = fma(v, v, squares);
    });
    vf scale = spread(factor / __builtin_sqrtf(sum_of(squares) + 1e-6f));
    by_lanes(count, [=](int64_t at, int lanes) { store_some(out + at, mul(load_some(x + at, lanes), scale), lanes, false); });
}

void convolve(const Convolution& given, int64_t count) {
    const int64_t past = given.num_taps - 1;
    auto value = [&](int64_t token, int64_t at, int lanes) {  // current or earlier tokens
        const float* from = token >= 0 ? given.x + token * given.x_stride : given.window + (past + token) * given.window_stride;
        return load_some(from + at, lanes);
    };
    for (int64_t token = 0; token < given.num_tokens; token++)
        by_lanes(count, [&](int64_t at, int lanes) {
            vf sum = zeros();
            for (int64_t tap = 0; tap <= past; tap++)
                sum = fma(value(token - past + tap, at, lanes), load_some(given.taps + tap * given.taps_stride + at, lanes), sum);
            store_some(given.out + token * given.out_stride + at, given.silu ? silu_times(sum, spread(1.0f)) : sum, lanes, false);
        });
    by_lanes(count, [&](int64_t at, int lanes) {  // oldest first: reads are ahead of writes
        for (int64_t i = 0; i < past; i++)
            store_some(given.window + i * given.window_stride + at, value(given.num_tokens - past + i, at, lanes), lanes, false);
    });
}

constexpr int kDeltaParts = kPairRows > 4 ? 4 : 2;  // value registers per sweep over the keys

// Values [first, first + 16 N) of a head. Every value has its own column in the state, so N does
// not change bits. A sweep over the keys computes the state after a token, its output, and the
// product with the next key.
template <int N> inline void delta_part(const DeltaHead& head, int64_t first) {
    const int64_t row = rounded(head.value_dim, kLanes);
    float* state = head.state + first;
    vf found[N];
    for (int n = 0; n < N; n++) found[n] = zeros();
    for (int64_t i = 0; i < head.key_dim; i++)
TW_UNROLL
        for (int n = 0; n < N; n++) found[n] = fma(load(state + i * row + 16 * n), spread(head.k[i]), found[n]);
    for (int64_t token = 0; token < head.num_tokens; token++) {
        const float* k = head.k + token * head.key_dim;
        const float* q = head.q + token * head.key_dim;
        const float* next = token + 1 < head.num_tokens ? k + head.key_dim : k;
        const vf keeps = spread(head.keeps[token]);
        vf change[N], out[N];
        for (int n = 0; n < N; n++) {
            int64_t left = head.value_dim - first - 16 * n;
            vf v = load_some(head.v + token * head.v_stride + first + 16 * n, (int)(left < 16 ? left : 16));
            change[n] = mul(spread(head.corrects[token]), sub(v, mul(keeps, found[n])));
            out[n] = found[n] = zeros();
        }
        for (int64_t i = 0; i < head.key_dim; i++) {
            vf own = spread(k[i]), asks = spread(q[i]), then = spread(next[i]);
TW_UNROLL
            for (int n = 0; n < N; n++) {
                float* at = state + i * row + 16 * n;
                vf now = fma(own, change[n], mul(keeps, load(at)));
                store(at, now);
                out[n] = fma(asks, now, out[n]);
                found[n] = fma(then, now, found[n]);
            }
        }
        for (int n = 0; n < N; n++) {
            int64_t left = head.value_dim - first - 16 * n;
            store_some(head.out + token * head.out_stride + first + 16 * n, out[n], (int)(left < 16 ? left : 16), false);
        }
    }
}

void delta_rule(const DeltaHead& head) {
    int64_t first = 0;
    for (; first + 16 * (kDeltaParts - 1) < head.value_dim; first += 16 * kDeltaParts) delta_part<kDeltaParts>(head, first);
    for (; first < head.value_dim; first += 16) delta_part<1>(head, first);
}

}  // namespace
