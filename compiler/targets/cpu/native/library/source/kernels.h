// What an instruction set offers: one table of functions, filled by a translation unit each.
//
// All of them do the same sums in the same order, so a result has the same bits on each.
#pragma once

#include <cstdint>

namespace tw {

// The rows that products read, prepared: `row_bytes` from one to the next.
struct Operand {
    const void* values;   // int8, bfloat16 or float, `columns` of them, whole blocks
    int64_t row_bytes;
    const float* scales;  // of int8: one a block of 16; of weights in blocks of 32 two neighbours are equal
    const int32_t* sums;  // of int8: one a block of 16
    int64_t num_blocks;   // of 32
};

// Where a pair of panels' results go: row m, lanes of the first panel then of the second.
struct Result {
    float* first;
    float* second;        // unused after SwiGLU
    int64_t stride;       // floats from row to row
    int32_t num_first, num_second;  // lanes that are written
    const float* bias;    // of the rows of the first panel, then of the second; or null
    bool adds, swiglu, rounds;
    const int64_t* offsets;  // of rows, in floats, where they do not follow each other; or null
};

// Two neighbouring panels of a weight, and the two that are read next: they are fetched meanwhile;
// where the second of these lies behind the first, only that is named.
struct PanelPair {
    int32_t kind, columns;
    const uint8_t* first;
    const uint8_t* second;
    const uint8_t* ahead[2];
};

// Keys and values of one head of one sequence; `step` bytes from 64 positions to the next, of which
// its keys are `chunk_bytes`; see caches.h. `unpacked`: room for a segment in bfloat16, where they are
// held in blocks.
struct HeadCache {
    const uint8_t* keys;
    const uint8_t* values;
    int64_t step, chunk_bytes;
    int32_t head_dim, is_bf16;
    uint8_t* unpacked;
};

// Query rows over one segment of a cache. Row r sees positions [begins[r], ends[r]).
struct Queries {
    int32_t num_rows;
    const void* q;        // bfloat16 or float, [rows][head_dim]
    const int32_t *begins, *ends;
    float scale, soft_cap;
};

// Of each row: the largest score, the sum of exponentials, and values weighted by them.
struct Partial {
    float *largest, *sum, *values;  // [rows], [rows], [rows][head_dim]
};

// Some channels of a sequence's tokens; rows are `strides` of floats apart. `window` holds the
// `num_taps` - 1 values before the first token, and then those before the next.
struct Convolution {
    const float *x, *taps;  // taps [num_taps][channels of the layer]
    float *out, *window;
    int64_t x_stride, taps_stride, out_stride, window_stride, num_tokens, num_taps;
};

// One head of the delta rule over a sequence's tokens: keys and queries [tokens][key_dim] of length
// 1, what the state [key_dim][whole 16 of value_dim] keeps, and how far it is corrected.
struct DeltaHead {
    int64_t num_tokens, key_dim, value_dim, v_stride, out_stride;
    const float *q, *k, *v, *keeps, *corrects;
    float *state, *out;
};

struct Kernels {
    int32_t isa, tile;    // rows that products take best at a time
    void (*quantise)(const float* x, int64_t columns, int32_t length, int8_t* q, float* scales, int32_t* sums);
    void (*to_bf16)(const float* x, int64_t count, uint16_t* out);
    void (*round_bf16)(float* x, int64_t count);
    void (*norm)(const float* x, const float* weight, float eps, int64_t count, float* out);
    void (*product_int8)(const PanelPair&, const Operand&, int64_t num_rows, const Result&);
    void (*product_bf16)(const PanelPair&, const Operand&, int64_t num_rows, const Result&, void* scratch);
    void (*product_fp32)(const PanelPair&, const Operand&, int64_t num_rows, const Result&, void* scratch);
    void (*swiglu)(const float* gate, const float* up, int64_t count, float* out);
    void (*sigmoid_gate)(const float* x, const float* gate, int64_t count, bool one, float* out);
    void (*function)(int32_t function, const float* x, const float* y, float number, int64_t count, float* out);
    void (*round_blocks)(float* x, int64_t count, int32_t num_bits);
    void (*to_blocks)(float* x, int64_t count, int8_t* codes, uint8_t* exponents);
    void (*blend)(float old, float own, const float* values, int64_t count, float* into);
    void (*to_fp32)(int kind, const uint8_t* panel, int64_t columns, float* out);
    void (*attend)(const HeadCache&, const Queries&, int32_t begin, int32_t end, const Partial&);
    void (*turn)(float* x, const float* cosines, const float* sines, int64_t num_pairs);
    void (*halves)(const float* x, int64_t count, uint16_t* out);  // bfloat16, no padding
    void (*divide)(const float* x, float by, int64_t count, float* out);
    void (*softmax)(const float* x, int64_t count, float* out);
    void (*weigh)(const float* values, const float* weights, int64_t num_values, int64_t stride, int64_t count, float* out);
    void (*unit)(const float* x, int64_t count, float factor, float* out);
    void (*convolve)(const Convolution&, int64_t count);
    void (*delta_rule)(const DeltaHead&);
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

}  // namespace tw
