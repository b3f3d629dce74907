// Attention of a step: q and k turn, k and v go into the cache, then every head attends.

#include <cmath>
#include <cstring>

#include "engine.h"

namespace tw {
namespace {

constexpr int kQueryTokens = 16;  // tokens of a prompt that attend as one piece of work

struct Layer {
    const TwInstruction& each;
    const TwState& state;
    const CacheLayout& layout;
    int64_t num_heads, num_kv, dim, group;

    Layer(const Engine& engine, const TwInstruction& each)
        : each(each), state(engine.states[each.state]), layout(engine.layouts[each.state]), num_heads(each.num_heads),
          num_kv(state.num_heads), dim(layout.dim), group(num_heads / num_kv) {}

    int64_t query_bytes() const { return dim * (layout.is_float() ? 4 : 2); }
};

// Cosines, then sines, of every pair of channels, token by token.
struct Angles {
    const Kernels& kernels;
    const float* all;
    int64_t num_pairs;
    bool interleaved;

    // Turns one head's channels in place.
    void turn(float* x, int64_t token) const {
        const float *cosines = all + token * num_pairs * 2, *sines = cosines + num_pairs;
        if (!interleaved) return kernels.turn(x, cosines, sines, num_pairs);
        for (int64_t i = 0; i < num_pairs; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosines[i] - b * sines[i];
            x[2 * i + 1] = b * cosines[i] + a * sines[i];
        }
    }
};

// A position's channels in blocks, among those of a chunk of keys or of values.
void put_key_blocks(const Layer& layer, uint8_t* keys, int64_t position, const uint32_t* codes, const uint8_t* exponents) {
    const int64_t lane = position % 16, group = position % kPositions / 16;
    uint32_t* block = (uint32_t*)keys + group * layer.dim / 4 * 16;
    uint8_t* powers = keys + kPositions * layer.dim + group * layer.dim;
    for (int64_t four = 0; four < layer.dim / 4; four++) block[four * 16 + lane] = codes[four];
    for (int64_t part = 0; part < layer.dim / 16; part++) powers[part * 16 + lane] = exponents[part];
}

void put_value_blocks(const Layer& layer, uint8_t* values, int64_t position, const int8_t* codes, const uint8_t* exponents, bool is_last) {
    const int64_t at = position % kPositions;
    int8_t* to = (int8_t*)values + at / 4 * layer.dim * 4 + at % 4;
    uint8_t* powers = values + kPositions * layer.dim + at;
    for (int64_t d = 0; d < layer.dim; d++) to[d * 4] = codes[d];
    for (int64_t part = 0; part < layer.dim / 16; part++) powers[part * kPositions] = exponents[part];
    if (is_last && at % 2 == 0)
        for (int64_t part = 0; part < layer.dim / 16; part++) powers[part * kPositions + 1] = 0;
}

// `x`: channels up to whole 16; as many bfloat16 behind them are free.
void put_key(const Layer& layer, const Kernels& kernels, uint8_t* keys, int64_t position, float* x) {
    const int64_t lane = position % 16;
    uint32_t* block = (uint32_t*)(keys + position % kPositions / 16 * (layer.layout.chunk_bytes / 4));
    uint32_t* values = (uint32_t*)x;  // a channel, or a pair of them, each
    if (!layer.layout.is_float()) kernels.halves(x, layer.dim, (uint16_t*)(values += layer.dim));
    const int64_t count = layer.layout.is_float() ? layer.dim : layer.dim / 2;
    for (int64_t d = 0; d < count; d++) block[d * 16 + lane] = values[d];
}

// `is_last`: no later position is written in this step; its neighbour in a pair is made 0, so that
// what was there before weighs nothing, whatever it was.
void put_value(const Layer& layer, const Kernels& kernels, uint8_t* values, int64_t position, const float* x, bool is_last) {
    if (layer.layout.is_float()) {
        std::memcpy((float*)values + position % kPositions * layer.dim, x, layer.state.head_dim * 4);
        return;
    }
    uint16_t* to = (uint16_t*)values + position % kPositions / 2 * layer.dim * 2;
    const uint16_t* halves = (const uint16_t*)(x + layer.dim);
    kernels.halves(x, layer.dim, (uint16_t*)halves);
    for (int64_t d = 0; d < layer.dim; d++) to[d * 2 + position % 2] = halves[d];
    if (is_last && position % 2 == 0)
        for (int64_t d = 0; d < layer.dim; d++) to[d * 2 + 1] = 0;
}

// Turns the query heads of one key/value head of a token, which go to `queries`, and its key, which
// goes into its seat's cache with the value.
void take_head(Worker& worker, const Layer& layer, int64_t token, int64_t sequence, int64_t head, const Angles& angles) {
    const TwStep& step = worker.step;
    const int64_t head_dim = layer.state.head_dim, bits = layer.state.mantissa_bits;
    const float* qkv = worker.at(layer.each.x, token);
    float* x = (float*)worker.scratch();
    for (int64_t d = head_dim; d < layer.dim; d++) x[d] = 0.0f;
    for (int64_t query = head * layer.group; query < (head + 1) * layer.group; query++) {
        std::memcpy(x, qkv + query * head_dim, head_dim * 4);
        angles.turn(x, token);
        uint8_t* to = worker.engine.queries.data() + (token * layer.num_heads + query) * layer.query_bytes();
        if (layer.layout.is_float()) std::memcpy(to, x, layer.dim * 4);
        else worker.kernels().halves(x, layer.dim, (uint16_t*)to);
    }
    const int64_t position = step.positions[token];
    uint8_t* keys = worker.engine.cache_of(layer.each.state, step.seats[sequence], head, position);
    const bool is_last = token + 1 == step.bounds[sequence + 1];
    std::memcpy(x, qkv + (layer.num_heads + head) * head_dim, head_dim * 4);
    angles.turn(x, token);
    int8_t* codes = (int8_t*)(x + layer.dim);
    uint8_t* exponents = (uint8_t*)codes + layer.dim;
    if (bits) worker.kernels().round_blocks(x, head_dim, bits);
    if (layer.layout.is_blocks()) {
        worker.kernels().to_blocks(x, layer.dim, codes, exponents);
        put_key_blocks(layer, keys, position, (const uint32_t*)codes, exponents);
    } else {
        put_key(layer, worker.kernels(), keys, position, x);
    }
    std::memcpy(x, qkv + (layer.num_heads + layer.num_kv + head) * head_dim, head_dim * 4);
    if (bits) worker.kernels().round_blocks(x, head_dim, bits);
    uint8_t* values = keys + layer.layout.chunk_bytes;
    if (layer.layout.is_blocks()) {
        worker.kernels().to_blocks(x, layer.dim, codes, exponents);
        put_value_blocks(layer, values, position, codes, exponents, is_last);
    } else {
        put_value(layer, worker.kernels(), values, position, x, is_last);
    }
}

// What a thread needs to attend with the tokens of one piece of work.
struct AttendScratch {
    float *largest, *sum, *values;      // of a segment
    float *all_largest, *all_sum, *all; // of the segments so far
    int32_t *begins, *ends;
    uint8_t *q, *unpacked;

    AttendScratch(uint8_t* memory, int64_t rows, int64_t dim) {
        float* next = (float*)memory;
        for (float** each : {&values, &all}) *each = next, next += rows * dim;
        q = (uint8_t*)next;
        next += rows * dim;
        for (float** each : {&largest, &sum, &all_largest, &all_sum}) *each = next, next += rounded(rows, 16);
        begins = (int32_t*)next;
        ends = begins + rounded(rows, 16);
        unpacked = (uint8_t*)rounded((int64_t)(ends + rounded(rows, 16)), 64);
    }
};

// Merges a segment's sums into those before it.
void merge(const Kernels& kernels, AttendScratch& to, int64_t row, int64_t dim) {
    float before = to.all_largest[row], own = to.largest[row];
    if (own == -INFINITY) return;
    float most = own > before || std::isnan(own) ? own : before;
    float old_share = before == -INFINITY ? 0.0f : std::exp(before - most), own_share = std::exp(own - most);
    kernels.blend(old_share, own_share, to.values + row * dim, dim, to.all + row * dim);
    to.all_sum[row] = to.all_sum[row] * old_share + to.sum[row] * own_share;
    to.all_largest[row] = most;
}

// Tokens [first, last) of a sequence attend with the query heads of one key/value head.
void attend_tokens(Worker& worker, const Layer& layer, int64_t sequence, int64_t head, int64_t first, int64_t last) {
    const TwInstruction& each = layer.each;
    const int64_t rows = (last - first) * layer.group, dim = layer.dim, width = layer.query_bytes();
    AttendScratch scratch(worker.scratch(), rows, dim);
    for (int64_t row = 0; row < rows; row++) {
        int64_t token = first + row / layer.group, query = head * layer.group + row % layer.group;
        std::memcpy(scratch.q + row * width, worker.engine.queries.data() + (token * layer.num_heads + query) * width, width);
        int32_t end = worker.step.positions[token] + 1;
        scratch.ends[row] = end;
        scratch.begins[row] = each.window > 0 && end > each.window ? end - each.window : 0;
        scratch.all_largest[row] = -INFINITY;
        scratch.all_sum[row] = 0.0f;
        std::memset(scratch.all + row * dim, 0, dim * 4);
    }
    const uint8_t* keys = worker.engine.cache_of(each.state, worker.step.seats[sequence], head, 0);
    const HeadCache cache{keys, keys + layer.layout.chunk_bytes, worker.engine.cache_step, layer.layout.chunk_bytes,
                          (int32_t)dim, !layer.layout.is_float(), layer.layout.is_blocks() ? scratch.unpacked : nullptr};
    const Queries queries{(int32_t)rows, scratch.q, scratch.begins, scratch.ends, each.scale, each.soft_cap};
    const Partial partial{scratch.largest, scratch.sum, scratch.values};
    const int32_t limit = scratch.ends[rows - 1];
    for (int32_t at = scratch.begins[0] / kSegment * kSegment; at < limit; at += kSegment) {
        worker.kernels().attend(cache, queries, at, at + kSegment, partial);
        for (int64_t row = 0; row < rows; row++) merge(worker.kernels(), scratch, row, dim);
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t token = first + row / layer.group, query = head * layer.group + row % layer.group;
        float* out = worker.at(each.out, token) + query * layer.state.head_dim;
        worker.kernels().divide(scratch.all + row * dim, scratch.all_sum[row], layer.state.head_dim, out);
    }
}

// The first keys that a token will see, while it is made ready.
void ask_for_keys(const Worker& worker, const Layer& layer, int64_t sequence, int64_t head) {
    const int64_t end = worker.step.positions[sequence] + 1, window = layer.each.window;
    const int64_t first = window > 0 && end > window ? end - window : 0;
    const uint8_t* keys = worker.engine.cache_of(layer.each.state, worker.step.seats[sequence], head, first);
    for (int64_t at = 0; at < 2 * layer.layout.chunk_bytes; at += 64) __builtin_prefetch(keys + at, 0, 1);
}

int64_t sequence_of(const TwStep& step, int64_t token) {
    int64_t low = 0, high = step.num_sequences;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        (step.bounds[middle] <= token ? low : high) = middle;
    }
    return low;
}

}  // namespace

// Cosines and sines of every token, once a step.
void make_angles(Worker& worker) {
    Engine& engine = worker.engine;
    for (size_t table = 0; table < engine.angle_makers.size(); table++) {
        const TwInstruction& maker = engine.instructions[engine.angle_makers[table]];
        const TwTensor& tensor = engine.tensors[maker.other];
        const float* frequency = (const float*)tensor.data;
        worker.share(worker.step.num_tokens, [&](int64_t token) {
            float* to = (float*)engine.angles[table].data() + token * tensor.rows * 2;
            for (int32_t i = 0; i < tensor.rows; i++) {
                float angle = (float)worker.step.positions[token] * frequency[i];
                to[i] = std::cos(angle) * maker.factor;
                to[tensor.rows + i] = std::sin(angle) * maker.factor;
            }
        });
    }
}

void run_attend(Worker& worker, const TwInstruction& each, int32_t index) {
    Engine& engine = worker.engine;
    const TwStep& step = worker.step;
    const Layer layer(engine, each);
    const float* turns = (const float*)engine.angles[engine.angles_of[index]].data();
    const Angles angles{worker.kernels(), turns, engine.tensors[each.other].rows, (each.flags & TW_INTERLEAVED) != 0};
    if (step.num_tokens == step.num_sequences) {  // one token each: a head needs no other thread's
        worker.share(step.num_sequences * layer.num_kv, [&](int64_t i) {
            int64_t sequence = i / layer.num_kv, head = i % layer.num_kv;
            ask_for_keys(worker, layer, sequence, head);
            take_head(worker, layer, sequence, sequence, head, angles);
            attend_tokens(worker, layer, sequence, head, sequence, sequence + 1);
        });
        return;
    }
    worker.share(step.num_tokens, [&](int64_t token) {
        const int64_t sequence = sequence_of(step, token);
        for (int64_t head = 0; head < layer.num_kv; head++) take_head(worker, layer, token, sequence, head, angles);
    });
    worker.meet();
    int64_t most = 1;
    for (int64_t i = 0; i < step.num_sequences; i++) {
        int64_t count = step.bounds[i + 1] - step.bounds[i];
        most = count > most ? count : most;
    }
    const int64_t pieces = (most + kQueryTokens - 1) / kQueryTokens;
    worker.share(step.num_sequences * pieces * layer.num_kv, [&](int64_t i) {
        // the longest first: the last tokens see the most
        int64_t head = i % layer.num_kv, rest = i / layer.num_kv;
        int64_t sequence = rest % step.num_sequences, piece = pieces - 1 - rest / step.num_sequences;
        int64_t begin = step.bounds[sequence], end = step.bounds[sequence + 1];
        int64_t first = begin + piece * kQueryTokens;
        if (first >= end) return;
        attend_tokens(worker, layer, sequence, head, first, first + kQueryTokens < end ? first + kQueryTokens : end);
    });
}

}  // namespace tw
