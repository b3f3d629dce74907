// The library's C interface: a program of instructions over buffers, and steps of a program.
//
// Opening a program checks the structures by size and version, and checks every number in them. A
// program with an invalid index or width is rejected.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum { TW_VERSION = 13 };

enum TwOp : int32_t {
    TW_EMBED, TW_LINEAR, TW_ATTEND, TW_GATHER, TW_SWIGLU, TW_NORM_HEADS, TW_NORM, TW_ELEMENTWISE,
    TW_SIGMOID_GATE, TW_ROUTE, TW_EXPERTS, TW_EXPERT_SUM, TW_CONVOLVE, TW_DELTA_RULE,
    TW_ALL_REDUCE, TW_GATHER_LOGITS, TW_CROSS_ATTEND, TW_ADD_GATED, TW_READ_HIDDEN,
    TW_NUM_OPS
};

// ROUNDED: round outputs to bfloat16, stored in float. NORM_ROUNDED: round a matmul's fused norm.
// LINEAR: a convolution without SiLU. CROSS: skip the instruction in steps without images.
enum TwFlag : int32_t {
    TW_RESIDUAL = 1, TW_PAIRED = 2, TW_INTERLEAVED = 4, TW_RENORMALISE = 8, TW_ROUNDED = 16, TW_NORM_ROUNDED = 32,
    TW_LINEAR_TAPS = 64, TW_CROSS = 128
};

// Weight storage: see panels.h. FP32 is also used for norms, biases and constants.
enum TwKind : int32_t {
    TW_FP32, TW_BF16, TW_FP16, TW_Q80, TW_Q40, TW_BFP8, TW_BFP4, TW_Q41, TW_Q50, TW_Q51, TW_Q4_K, TW_Q5_K,
    TW_Q6_K, TW_FP8, TW_IQ4_XS, TW_NVFP4, TW_NF4, TW_VECTOR, TW_NUM_KINDS
};

// Operand types for matmuls. Sums are always fp32.
enum TwArithmetic : int32_t { TW_AS_FP32, TW_AS_BF16, TW_AS_INT8, TW_NUM_ARITHMETICS };

enum TwFunction : int32_t { TW_ADD, TW_MUL, TW_DIV, TW_TANH, TW_GELU, TW_GELU_TANH, TW_NUM_FUNCTIONS };

// Link formats for partial sums: the `function` of an all-reduce.
enum TwWire : int32_t { TW_WIRE_FP32, TW_WIRE_BF16, TW_WIRE_Q80, TW_NUM_WIRES };

// Columns [first, first + width) of a buffer's rows.
struct TwPlace {
    int32_t buffer, first, width;
};

// Unused tensor indices are -1. Unused columns have buffer -1. `bias` is also attention's sinks per
// query head, a router's bias per expert (its weights are then sigmoids times `scale`), and biases of
// experts in their panels' order. A `soft_cap` of paired experts selects the clamped SwiGLU with
// `factor`.
struct TwInstruction {
    int32_t op, flags;
    int32_t arithmetic[2];                    // prefill, decode
    TwPlace out, x, y, z, gate;
    int32_t weight, norm, bias, other, state; // tensor and state indices
    int32_t num_heads, window, function, num_key_heads, num_experts, top_k;
    float eps, scale, soft_cap, factor, number;
};

// A matmul weight has whole panels. A vector has `rows` values and a single column.
struct TwTensor {
    int32_t kind, rows, columns;
    const void* data;
    uint64_t num_bytes;
};

enum TwStateKind : int32_t { TW_KEYS_VALUES, TW_WINDOW, TW_MATRIX, TW_NUM_STATE_KINDS };

// Key and value storage. BFP8: 8-bit codes with a power of two per 16 channels of a position.
enum TwCache : int32_t { TW_CACHE_FP32, TW_CACHE_BF16, TW_CACHE_BFP8, TW_NUM_CACHES };

// Keys and values of a layer, or constant-size state in float: the last `head_dim` values of
// `num_heads` convolution channels, or the matrix [head_dim][value_dim] per delta rule head.
// `mantissa_bits`: block float rounding of keys and values. 0: none. BFP8 has 7.
struct TwState {
    int32_t kind, cache, num_heads, head_dim, value_dim, mantissa_bits;
};

struct TwProgram {
    uint32_t size, version, instruction_size, tensor_size;
    int32_t num_threads, isa;                 // isa: -1 for the best that runs here
    int32_t max_num_seqs, max_context, max_tokens;
    int32_t num_instructions, num_tensors, num_buffers, num_states;
    int32_t logits;                           // the caller's buffer
    int32_t large_pages;                      // 1: tensors are copied onto large pages, and not read
                                              // again; 2: and are of a mapped file, whose pages are
                                              // released. The embedding stays in it.
    const TwInstruction* instructions;
    const TwTensor* tensors;
    const int32_t* widths;                    // per buffer, in floats
    const TwState* states;
};

// Sequence tokens, consecutive. `bounds` splits them. `rows` selects rows for logits.
//
// For several ranks, only rank 0 has logits. With `best` it gets only the argmax over the first
// `num_choosable` tokens per row. All ranks set it for the same steps.
struct TwBest {
    float value;
    int32_t token;
};

struct TwStep {
    int32_t num_tokens, num_sequences, num_rows, decodes;
    const int32_t *tokens, *positions, *bounds, *slots, *rows;
    float* logits;                            // [num_rows, logits width]
    TwBest* best;                             // [num_rows], or null
    float* hidden;                            // [num_rows, columns of the head]: its input, normed; or null.
                                              // With logits: [num_tokens, columns], of all tokens
    int32_t num_choosable;
    const int32_t* image_rows;                // [num_tokens], index in embeddings, or -1 for text
    const float* embeddings;                  // [image tokens, hidden size]
    const int32_t* rotary;                    // [num_tokens, frequencies], rotary positions, or null
    const int32_t* visible;                   // [num_tokens, 2], first image and end; null: no images
    const void* const* cross;                 // per image: [cross_rows, cross_width], keys and values
    const int32_t* cross_rows;                // per image
    int32_t num_images, cross_width;
    const float* carried;                     // [num_tokens, hidden size], for TW_READ_HIDDEN
    const int32_t* ends;                      // [num_tokens], after the last visible position, ascending; null: causal
    int32_t cross_bits;                       // of a value in `cross`: 32, or 16 for bfloat16
};

// A program's ranks: sockets by rank (its own entry is unused), timeout, socket polls before
// sleeping, logits per rank, and the size in bytes from which sums use two hops.
struct TwPeers {
    int32_t rank, count, limit_ms, looks, most_looks;
    const int32_t *sockets, *logit_widths;
    int64_t two_hops_from;
};

// Since joining: collective count, bytes sent, nanoseconds spent, and the failed rank or -1.
struct TwExchanged {
    int64_t number, num_bytes, nanoseconds, failed;
};

int32_t tw_version();
int32_t tw_best_isa();                        // 0 scalar; 1 AVX2, 2 AVX-512 with VNNI and BF16; on ARM 1 NEON with dot products
void* tw_open(const TwProgram* program, char* error, int32_t error_size);
int32_t tw_step(void* engine, const TwStep* step);  // 0; 1: invalid step; 2: failed rank
int32_t tw_join(void* engine, const TwPeers* peers);  // before the first step; 0, or 1 if invalid
void tw_set_hops(void* engine, int64_t two_hops_from);
void tw_exchanged(void* engine, TwExchanged* found);
// Sum [rows, width] over all ranks, in place, as in steps. Return 0, or 2 after a rank's failure.
int32_t tw_all_reduce(void* engine, float* values, int32_t rows, int32_t width, int32_t wire);
void tw_clear(void* engine, int32_t slot);
void tw_copy(void* engine, int32_t source, int32_t target, int32_t num_positions);
int64_t tw_slot_bytes(void* engine, int32_t num_positions);
int64_t tw_sequence_bytes(void* engine);      // constant-size state per slot
void tw_save(void* engine, int32_t slot, void* to);
void tw_load(void* engine, int32_t slot, const void* from);
// Keep the constant-size state after each token of the next steps, [num_tokens][tw_sequence_bytes],
// so that tw_load can discard tokens. Null stops.
void tw_keep_rows(void* engine, void* states);
void tw_times(void* engine, int64_t* times);  // add nanoseconds per instruction; null stops
void tw_close(void* engine);
}
#pragma GCC visibility pop
