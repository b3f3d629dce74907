// Linear attention: a causal convolution, and the gated delta rule with its norm and gate.
//
// Prefill runs the recurrence like decode, with the state in the L1 cache. Then a row's bits do not
// depend on prompt splits. Chunks with a triangular system would not guarantee this.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor.h"

namespace tw {
namespace {

constexpr int kChannels = 256;    // per convolution task
constexpr int kDeltaTokens = 64;  // prepared tokens per head

// A thread's memory for a head's next tokens.
struct Scratch {
    float *q, *k, *keeps, *corrects, *out;
    int64_t num_bytes;

    Scratch(uint8_t* memory, const TwState& state) {
        q = (float*)memory;
        k = q + kDeltaTokens * state.head_dim;
        keeps = k + kDeltaTokens * state.head_dim;
        corrects = keeps + kDeltaTokens;
        out = corrects + kDeltaTokens;
        num_bytes = (uint8_t*)(out + kDeltaTokens * rounded(state.value_dim, kLanes)) - memory;
    }
};

// A value head in a sequence.
struct Head {
    Worker& worker;
    const TwInstruction& each;
    const TwState& state;
    int64_t index;

    void prepare(int64_t token, int64_t at, const Scratch& to) const {
        const int64_t key_dim = state.head_dim, key_head = index * each.num_key_heads / state.num_heads;
        const float* q = worker.at(each.x, token) + key_head * key_dim;
        const float* k = q + each.num_key_heads * key_dim;
        worker.kernels().unit(q, key_dim, 1.0f / std::sqrt((float)key_dim), to.q + at * key_dim);
        worker.kernels().unit(k, key_dim, 1.0f, to.k + at * key_dim);
        float a = worker.at(each.y, token)[index] + worker.vector(each.other)[index];
        float softplus = a > 20.0f ? a : std::log1p(std::exp(a));
        to.keeps[at] = std::exp(-std::exp(worker.vector(each.bias)[index]) * softplus);
        to.corrects[at] = 1.0f / (1.0f + std::exp(-worker.at(each.z, token)[index]));
    }

    // Tokens [first, first + count) in the step, consecutive in a sequence.
    void run(int64_t first, int64_t count, float* kept, const Scratch& scratch) const {
        const int64_t value_dim = state.value_dim, stride = rounded(value_dim, kLanes);
        for (int64_t i = 0; i < count; i++) prepare(first + i, i, scratch);
        const float* v = worker.at(each.x, first) + 2 * each.num_key_heads * state.head_dim + index * value_dim;
        const DeltaHead head{count, state.head_dim, value_dim, worker.stride(each.x), stride, scratch.q, scratch.k, v,
                             scratch.keeps, scratch.corrects, kept, scratch.out};
        worker.kernels().delta_rule(head);
        for (int64_t i = 0; i < count; i++) {
            float* normed = scratch.out + i * stride;
            worker.kernels().norm(normed, worker.vector(each.norm), each.eps, value_dim, normed);
            const float* gate = worker.at(each.gate, first + i) + index * value_dim;
            float* out = worker.at(each.out, first + i) + index * value_dim;
            worker.kernels().swiglu(gate, normed, value_dim, out);
            if (each.flags & TW_ROUNDED) worker.kernels().round_bf16(out, value_dim);
        }
    }
};

}  // namespace

int64_t delta_scratch(const TwState& state) { return Scratch(kNowhere, state).num_bytes; }

void run_convolve(Worker& worker, const TwInstruction& each) {
    const TwStep& step = worker.step;
    const TwState& state = worker.engine.states[each.state];
    const int64_t channels = state.num_heads, pieces = (channels + kChannels - 1) / kChannels;
    const int64_t stride = rounded(channels, kLanes);
    worker.share(step.num_sequences * pieces, [&](int64_t i) {
        const int64_t sequence = i / pieces, at = i % pieces * kChannels, first = step.bounds[sequence];
        const int64_t count = std::min<int64_t>(kChannels, channels - at), num_tokens = step.bounds[sequence + 1] - first;
        float* window = worker.engine.kept_of(each.state, step.slots[sequence]) + at;
        if (step.positions[first] == 0)
            for (int32_t row = 0; row < state.head_dim; row++) std::memset(window + row * stride, 0, count * 4);
        const bool keeps = worker.engine.row_states;
        for (int64_t token = first; token < first + num_tokens; token += keeps ? 1 : num_tokens) {
            const Convolution given{worker.at(each.x, token) + at, worker.vector(each.weight) + at, worker.at(each.out, token) + at, window,
                                    worker.stride(each.x), channels, worker.stride(each.out), stride, keeps ? 1 : num_tokens, state.head_dim + 1,
                                    !(each.flags & TW_LINEAR_TAPS)};
            worker.kernels().convolve(given, count);
            for (int64_t row = 0; keeps && row < state.head_dim; row++)
                std::memcpy(worker.engine.kept_after(each.state, token) + at + row * stride, window + row * stride, count * 4);
        }
        for (int64_t row = 0; each.flags & TW_ROUNDED && row < num_tokens; row++)
            worker.kernels().round_bf16(worker.at(each.out, first + row) + at, count);
    });
}

void run_delta_rule(Worker& worker, const TwInstruction& each) {
    const TwStep& step = worker.step;
    const TwState& state = worker.engine.states[each.state];
    const int64_t size = state.head_dim * rounded(state.value_dim, kLanes);
    const Scratch scratch(worker.scratch(), state);
    worker.share((int64_t)step.num_sequences * state.num_heads, [&](int64_t i) {
        const int64_t sequence = i / state.num_heads, end = step.bounds[sequence + 1];
        const Head head{worker, each, state, i % state.num_heads};
        int64_t first = step.bounds[sequence];
        float* kept = worker.engine.kept_of(each.state, step.slots[sequence]) + head.index * size;
        if (step.positions[first] == 0) std::memset(kept, 0, size * 4);
        const bool keeps = worker.engine.row_states;
        const int64_t most = keeps ? 1 : kDeltaTokens;
        for (; first < end; first += most) {
            head.run(first, std::min<int64_t>(most, end - first), kept, scratch);
            if (keeps) std::memcpy(worker.engine.kept_after(each.state, first) + head.index * size, kept, size * 4);
        }
    });
}

}  // namespace tw
