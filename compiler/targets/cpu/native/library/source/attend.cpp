// Attention in a step: rotate q and k, write k and v to the cache, then attend with every head.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "executor.h"

namespace tw {
namespace {


struct Layer {
    const TwInstruction& each;
    const TwState& state;
    const CacheLayout& layout;
    int64_t num_heads, num_kv, dim, group;
    int64_t bf16_bytes;  // of a query's value

    Layer(const Engine& engine, const TwInstruction& each)
        : each(each), state(engine.states[each.state]), layout(engine.layouts[each.state]), num_heads(each.num_heads),
          num_kv(state.num_heads), dim(layout.dim), group(num_heads / num_kv), bf16_bytes(engine.kernels->bf16_bytes) {}

    int64_t query_bytes() const { return dim * (layout.is_float() ? 4 : bf16_bytes); }

    // First visible position of a token. `end` is the number of positions up to and including its
    // own.
    int32_t begin_of(int32_t end) const { return each.window > 0 && end > each.window ? end - each.window : 0; }
};

// Position after a token's last visible position.
int32_t end_of(const TwStep& step, int64_t token) { return step.ends ? step.ends[token] : step.positions[token] + 1; }

// Cosines, then sines, for every pair of channels, token by token.
struct Angles {
    const Kernels& kernels;
    const float* all;
    int64_t num_pairs;
    bool interleaved;

    // Rotate a head's channels in place.
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

// Write a position's block channels into a key or value chunk.
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

// `x` has channels padded to whole 16, followed by the same free bfloat16 value count.
void put_key(const Layer& layer, const Kernels& kernels, uint8_t* keys, int64_t position, float* x) {
    const int64_t lane = position % 16;
    uint32_t* block = (uint32_t*)(keys + position % kPositions / 16 * (layer.layout.chunk_bytes / 4));
    uint32_t* values = (uint32_t*)x;  // a channel or a pair each
    if (!layer.layout.is_float()) kernels.halves(x, layer.dim, (uint16_t*)(values += layer.dim));
    const int64_t count = layer.layout.is_float() ? layer.dim : layer.dim / 2;
    for (int64_t d = 0; d < count; d++) block[d * 16 + lane] = values[d];
}

// `is_last`: this step writes no later position. Its neighbor in a pair is set to 0, so that old
// contents have no effect.
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

// Rotate a token's query head to attention's operand type. `x` is scratch for its channels.
void take_query(const Worker& worker, const Layer& layer, int64_t token, int64_t query, const Angles& angles, float* x, uint8_t* to) {
    const int64_t head_dim = layer.state.head_dim;
    for (int64_t d = head_dim; d < layer.dim; d++) x[d] = 0.0f;
    std::memcpy(x, worker.at(layer.each.x, token) + query * head_dim, head_dim * 4);
    angles.turn(x, token);
    if (layer.each.flags & TW_ROUNDED) worker.kernels().round_bf16(x, head_dim);
    const bool is_rounded = !layer.layout.is_float() && layer.bf16_bytes == 4;
    if (is_rounded) worker.kernels().round_bf16(x, layer.dim);
    if (layer.layout.is_float() || is_rounded) std::memcpy(to, x, layer.dim * 4);
    else worker.kernels().halves(x, layer.dim, (uint16_t*)to);
}

// Rotate a token's key for a head, and write it to its slot's cache with the value.
void take_key_value(const Worker& worker, const Layer& layer, int64_t token, int64_t sequence, int64_t head, const Angles& angles) {
    const TwStep& step = worker.step;
    const int64_t head_dim = layer.state.head_dim, bits = layer.state.mantissa_bits;
    const float* qkv = worker.at(layer.each.x, token);
    float* x = (float*)worker.scratch();
    for (int64_t d = head_dim; d < layer.dim; d++) x[d] = 0.0f;
    const int64_t position = step.positions[token];
    uint8_t* keys = worker.engine.cache_of(layer.each.state, step.slots[sequence], head, position);
    const bool is_last = token + 1 == step.bounds[sequence + 1];
    std::memcpy(x, qkv + (layer.num_heads + head) * head_dim, head_dim * 4);
    angles.turn(x, token);
    if (layer.each.flags & TW_ROUNDED) worker.kernels().round_bf16(x, head_dim);
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

// Consecutive tokens of a sequence, and their visible cache segments.
struct Block {
    int64_t sequence, first, last;
    int32_t begin, end;  // multiples of kSegment

    int64_t num_segments() const { return (end - begin) / kSegment; }
};

// A block with a key/value head. A split block has a single segment and a partial result.
struct Work {
    Block block;
    int64_t head, segment, slot;
    bool is_split;
};

// A layer's work, in an order common to all threads: the longest blocks are first. A block is
// split if its segments would keep a thread busy for more than a quarter of its share. The number
// of these blocks is bounded, so each has a slot.
class Agenda {
  public:
    Agenda(const Worker& worker, const Layer& layer) : step_(worker.step), layer_(layer), num_threads_(worker.engine.pool->size()) {
        int64_t most = 1;
        for (int64_t i = 0; i < step_.num_sequences; i++) most = std::max<int64_t>(most, step_.bounds[i + 1] - step_.bounds[i]);
        num_parts_ = (most + kQueryTokens - 1) / kQueryTokens;
        for (int64_t i = 0; i < num_blocks(); i++) num_segments_ += block(i).num_segments() * layer.num_kv;
        for (int64_t i = 0; i < num_blocks(); i++) count_ += pieces_of(block(i));
    }

    int64_t count() const { return count_; }

    // Return the work at `index`. Indices must not decrease between calls.
    Work find(int64_t index) {
        Block found = block(at_);
        for (; index >= first_ + pieces_of(found); found = block(++at_)) {
            first_ += pieces_of(found);
            slot_ += is_split(found) ? layer_.num_kv : 0;
        }
        const int64_t rest = index - first_, head = rest % layer_.num_kv;
        return {found, head, rest / layer_.num_kv, slot_ + head, is_split(found)};
    }

  private:
    int64_t num_blocks() const { return num_parts_ * step_.num_sequences; }

    // A block without segments means that a sequence has no block there.
    Block block(int64_t index) const {
        const int64_t sequence = index % step_.num_sequences, part = num_parts_ - 1 - index / step_.num_sequences;
        const int64_t end = step_.bounds[sequence + 1], first = step_.bounds[sequence] + part * kQueryTokens;
        if (first >= end) return {sequence, end, end, 0, 0};
        const int64_t last = std::min(first + kQueryTokens, end);
        const int32_t begin = layer_.begin_of(step_.positions[first] + 1) / kSegment * kSegment;
        return {sequence, first, last, begin, (int32_t)rounded(end_of(step_, last - 1), kSegment)};
    }

    bool is_split(const Block& block) const {
        const int64_t count = block.num_segments();
        return num_threads_ > 1 && count > 1 && count * kShares * num_threads_ > num_segments_;
    }

    int64_t pieces_of(const Block& block) const {
        const int64_t count = block.num_segments();
        return is_split(block) ? count * layer_.num_kv : count ? layer_.num_kv : 0;
    }

    const TwStep& step_;
    const Layer& layer_;
    const int64_t num_threads_;
    int64_t num_parts_ = 0, num_segments_ = 0, count_ = 0;
    int64_t at_ = 0, first_ = 0, slot_ = 0;  // of the current block
};

// A thread's scratch for attention.
struct AttendScratch {
    float *largest, *sum, *values;      // segment
    float *all_largest, *all_sum, *all; // merged segments
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

// Merge a segment's sums for a row into the previous sums.
void merge(const Kernels& kernels, const Partial& from, AttendScratch& to, int64_t row, int64_t dim) {
    float before = to.all_largest[row], own = from.largest[row];
    if (own == -INFINITY) return;
    float most = own > before || std::isnan(own) ? own : before;
    float old_share = before == -INFINITY ? 0.0f : std::exp(before - most), own_share = std::exp(own - most);
    kernels.blend(old_share, own_share, from.values + row * dim, dim, to.all + row * dim);
    to.all_sum[row] = to.all_sum[row] * old_share + from.sum[row] * own_share;
    to.all_largest[row] = most;
}

// Rows for a key/value head: tokens times the query heads sharing it.
struct Rows {
    Worker& worker;
    const Layer& layer;
    const Work& work;
    const int64_t count, dim;
    AttendScratch scratch;

    Rows(Worker& worker, const Layer& layer, const Work& work)
        : worker(worker), layer(layer), work(work), count((work.block.last - work.block.first) * layer.group),
          dim(layer.dim), scratch(worker.scratch(), count, dim) {}

    int64_t token(int64_t row) const { return work.block.first + row / layer.group; }
    int64_t query(int64_t row) const { return work.head * layer.group + row % layer.group; }

    // Read queries with `angles`, or from the common queries without angles.
    void make_ready(const Angles* angles) {
        const int64_t width = layer.query_bytes();
        for (int64_t row = 0; row < count; row++) {
            uint8_t* to = scratch.q + row * width;
            if (angles) take_query(worker, layer, token(row), query(row), *angles, scratch.values, to);
            else std::memcpy(to, worker.engine.queries.data() + (token(row) * layer.num_heads + query(row)) * width, width);
            scratch.ends[row] = end_of(worker.step, token(row));
            scratch.begins[row] = layer.begin_of(worker.step.positions[token(row)] + 1);
            scratch.all_largest[row] = -INFINITY;
            scratch.all_sum[row] = 0.0f;
        }
        std::memset(scratch.all, 0, count * dim * 4);
    }

    void attend(int32_t at, const Partial& partial, const uint8_t* next) {
        const uint8_t* keys = worker.engine.cache_of(layer.each.state, worker.step.slots[work.block.sequence], work.head, 0);
        const HeadCache cache{keys, keys + layer.layout.chunk_bytes, layer.layout.step, layer.layout.chunk_bytes,
                              (int32_t)dim, !layer.layout.is_float(), layer.layout.is_blocks() ? scratch.unpacked : nullptr, next};
        const Queries queries{(int32_t)count, scratch.q, scratch.begins, scratch.ends, layer.each.scale, layer.each.soft_cap};
        worker.kernels().attend(cache, queries, at, at + kSegment, partial);
    }

    void add(const Partial& partial) {
        for (int64_t row = 0; row < count; row++) merge(worker.kernels(), partial, scratch, row, dim);
    }

    void finish() {
        for (int64_t row = 0; row < count; row++) {
            float* out = worker.at(layer.each.out, token(row)) + query(row) * layer.state.head_dim;
            float sum = scratch.all_sum[row];
            if (layer.each.bias >= 0) sum += std::exp(worker.vector(layer.each.bias)[query(row)] - scratch.all_largest[row]);
            worker.kernels().divide(scratch.all + row * dim, sum, layer.state.head_dim, out);
            if (layer.each.flags & TW_ROUNDED) worker.kernels().round_bf16(out, layer.state.head_dim);
        }
    }
};

// Partial result of a split block's segment.
Partial place_of(const Engine& engine, const Rows& rows, int64_t segment) {
    float* values = (float*)(engine.partials.data() + (rows.work.slot * engine.num_segments + segment) * engine.partial_bytes);
    float* largest = values + rows.count * rows.dim;
    return {largest, largest + rows.count, values};
}

// A row's segment sums are merged in order of positions, independent of threads: the last thread to
// finish merges all of them. `next`: keys to prefetch, or null.
void attend_rows(Worker& worker, const Layer& layer, const Work& work, const Angles* angles, const uint8_t* next = nullptr) {
    Rows rows(worker, layer, work);
    rows.make_ready(angles);
    if (!work.is_split) {
        const Partial own{rows.scratch.largest, rows.scratch.sum, rows.scratch.values};
        for (int32_t at = work.block.begin; at < work.block.end; at += kSegment) {
            rows.attend(at, own, at + kSegment < work.block.end ? nullptr : next);
            rows.add(own);
        }
        return rows.finish();
    }
    rows.attend(work.block.begin + (int32_t)work.segment * kSegment, place_of(worker.engine, rows, work.segment), next);
    std::atomic<int32_t>& arrived = worker.engine.arrived[work.slot];
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < work.block.num_segments()) return;
    arrived.store(0, std::memory_order_relaxed);
    for (int64_t segment = 0; segment < work.block.num_segments(); segment++) rows.add(place_of(worker.engine, rows, segment));
    rows.finish();
}

// Return the first visible keys.
const uint8_t* first_keys(const Worker& worker, const Layer& layer, const Work& work) {
    const int32_t first = std::max(layer.begin_of(worker.step.positions[work.block.first] + 1), work.block.begin + (int32_t)work.segment * kSegment);
    return worker.engine.cache_of(layer.each.state, worker.step.slots[work.block.sequence], work.head, first);
}

// Prefetch a chunk's keys and values while rows are prepared.
void ask_for_chunk(const Layer& layer, const uint8_t* keys) {
    for (int64_t at = 0; at < 2 * layer.layout.chunk_bytes; at += 64) __builtin_prefetch(keys + at, 0, 1);
}

// Return whether a block has a row for logits.
bool has_row(const TwStep& step, const Block& block) {
    const int32_t* found = std::lower_bound(step.rows, step.rows + step.num_rows, (int32_t)block.first);
    return found < step.rows + step.num_rows && *found < block.last;
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

// Compute all tokens' cosines and sines, once per step.
void make_angles(Worker& worker) {
    Engine& engine = worker.engine;
    for (size_t table = 0; table < engine.angle_makers.size(); table++) {
        const TwInstruction& maker = engine.instructions[engine.angle_makers[table]];
        const TwTensor& tensor = engine.tensors[maker.other];
        const float* frequency = (const float*)tensor.data;
        worker.share(worker.step.num_tokens, [&](int64_t token) {
            float* to = (float*)engine.angles[table].data() + token * tensor.rows * 2;
            const int32_t* rotary = worker.step.rotary;
            for (int32_t i = 0; i < tensor.rows; i++) {
                const int32_t position = rotary ? rotary[token * tensor.rows + i] : worker.step.positions[token];
                float angle = (float)position * frequency[i];
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
    Agenda agenda(worker, layer);
    // With a token per sequence, only its own segment has its key.
    if (step.num_tokens == step.num_sequences) {
        int64_t prefetched = -1;
        worker.share_followed(agenda.count(), [&](int64_t i, bool has_next) {
            const Work work = agenda.find(i);
            if (i != prefetched) ask_for_chunk(layer, first_keys(worker, layer, work));
            prefetched = has_next ? i + 1 : -1;
            if (!work.is_split || work.segment + 1 == work.block.num_segments())
                take_key_value(worker, layer, work.block.first, work.block.sequence, work.head, angles);
            attend_rows(worker, layer, work, &angles, has_next ? first_keys(worker, layer, agenda.find(i + 1)) : nullptr);
        });
        return;
    }
    worker.share(step.num_tokens, [&](int64_t token) {
        const int64_t sequence = sequence_of(step, token), width = layer.query_bytes();
        uint8_t* queries = engine.queries.data() + token * layer.num_heads * width;
        for (int64_t query = 0; query < layer.num_heads; query++)
            take_query(worker, layer, token, query, angles, (float*)worker.scratch(), queries + query * width);
        for (int64_t head = 0; head < layer.num_kv; head++) take_key_value(worker, layer, token, sequence, head, angles);
    });
    worker.meet();
    const bool selects = index == engine.tail && selects_rows(step);
    worker.share(agenda.count(), [&](int64_t i) {
        const Work work = agenda.find(i);
        if (!selects || has_row(step, work.block)) attend_rows(worker, layer, work, nullptr);
    });
}

}  // namespace tw
