// The function table of an instruction set. Each translation unit fills a table.
//
// All tables use equal sums in equal order, so results have equal bits.
#pragma once

#include <cstdint>

namespace tw {

// Terms of 32 int8 values in a prepared row, per 16 values or equal pairs. A dot product begins
// with a word of `starts`, which removes the zero of unsigned codes. For kinds with minimums, the
// word is the sum of all values, as a float.
struct BlockTerms {
    int32_t starts[2];
    float scales[2];
};

// Prepared matmul rows, `row_bytes` apart.
struct Operand {
    const void* values;   // int8, bfloat16 or float, whole blocks
    int64_t row_bytes;
    const BlockTerms* terms;  // int8 only, per block
    int64_t num_blocks;   // with 32 columns
    bool is_signed;       // values are blocks of quantise_signed, without terms
};

// Destination of a panel pair's results: in row m, the first panel's lanes, then of the second.
struct Result {
    float* first;
    float* second;        // unused after SwiGLU
    int64_t stride;       // floats from row to row
    int32_t num_first, num_second;  // written lanes
    const float* bias;    // first panel, then second panel; or null
    bool adds, swiglu, rounds;
    float limit, alpha;   // clamped SwiGLU, if limit > 0
    const int64_t* offsets;  // per row in floats, for scattered rows; or null
};

// Bytes to prefetch during a multiplication: `num_bytes` per stream, nothing if negative. Streams
// start every `stride` bytes. A block of columns prefetches `step` bytes per stream, so that
// requests do not come at once.
struct Ahead {
    const uint8_t* data = nullptr;
    int64_t num_streams = 0, stride = 0, num_bytes = 0, step = 0;
};

// Two neighboring weight panels.
struct PanelPair {
    int32_t kind, columns;
    const uint8_t* first;
    const uint8_t* second;
    Ahead ahead;
};

// Keys and values for a head of a sequence. Chunks are `step` bytes apart, and their keys take
// `chunk_bytes`. See caches.h. `unpacked`: bfloat16 scratch for a block storage segment.
struct HeadCache {
    const uint8_t* keys;
    const uint8_t* values;
    int64_t step, chunk_bytes;
    int32_t head_dim, is_bf16;
    uint8_t* unpacked;
    const uint8_t* next;  // next head's keys, prefetched in the last chunk; or null
};

// Query rows over a cache segment. Row r sees positions [begins[r], ends[r]).
struct Queries {
    int32_t num_rows;
    const void* q;        // bfloat16 or float, [rows][head_dim]
    const int32_t *begins, *ends;
    float scale, soft_cap;
};

// Per row: largest score, sum of exponentials, and weighted values.
struct Partial {
    float *largest, *sum, *values;  // [rows], [rows], [rows][head_dim]
};

// Channels of a sequence's tokens. `strides` are row distances in floats. `window` has the
// `num_taps` - 1 values before the first token, and afterwards the values before the next token.
struct Convolution {
    const float *x, *taps;  // taps [num_taps][layer channels]
    float *out, *window;
    int64_t x_stride, taps_stride, out_stride, window_stride, num_tokens, num_taps;
    bool silu;
};

// A delta rule head over a sequence's tokens: keys and queries [tokens][key_dim] with length 1,
// decay of the state [key_dim][value_dim padded to 16], and correction steps.
struct DeltaHead {
    int64_t num_tokens, key_dim, value_dim, v_stride, out_stride;
    const float *q, *k, *v, *keeps, *corrects;
    float *state, *out;
};

struct Kernels {
    int32_t isa;
    int32_t bf16_bytes;   // of a value in prepared rows and queries; 4: as float
    int32_t byte_words;   // 32-bit words of a prepared row per four 8-bit codes
    int32_t signed_rows;  // fewest rows for quantise_signed, which takes 64 bytes per 32 columns; 0: never
    void (*quantise)(const float* x, int64_t columns, int32_t kind, void* q, BlockTerms* terms);
    void (*quantise_signed)(const float* x, int64_t columns, int32_t kind, void* rows, int64_t row, int64_t num_rows);
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

// Null in a library without the instruction set's unit.
#define TW_OPTIONAL __attribute__((weak, visibility("default")))
TW_OPTIONAL const Kernels* scalar_kernels();
TW_OPTIONAL const Kernels* avx2_kernels();
TW_OPTIONAL const Kernels* avx512_kernels();
TW_OPTIONAL const Kernels* neon_kernels();

}  // namespace tw
