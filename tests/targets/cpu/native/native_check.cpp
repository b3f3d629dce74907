// A small random model for the sanitizers: all weight formats and arithmetics on each instruction set,
// with three threads. A row has equal bits in a batch and in a single run.
// TW_SKIPPED and TW_EVERY select fewer instruction sets and formats.
// A number as argument opens programs with random changes, and runs the accepted programs.

#include <algorithm>

#include "native_model.h"

#ifndef TW_SKIPPED
#define TW_SKIPPED 0
#define TW_EVERY 1
#endif

namespace {

void fail(const char* what) {
    std::printf("%s\n", what);
    std::exit(1);
}

std::vector<float> step(void* engine, std::vector<int32_t> slots, std::vector<int32_t> starts, int count, bool decodes) {
    std::vector<int32_t> tokens, positions, bounds{0}, rows;
    for (size_t s = 0; s < slots.size(); s++) {
        for (int i = 0; i < count; i++) {
            positions.push_back(starts[s] + i);
            tokens.push_back((starts[s] + i) * 7 % kVocab);
        }
        bounds.push_back((int32_t)tokens.size());
        rows.push_back((int32_t)tokens.size() - 1);
    }
    std::vector<float> logits(rows.size() * kVocab);
    TwStep given{(int32_t)tokens.size(), (int32_t)slots.size(), (int32_t)rows.size(), decodes, tokens.data(),
                 positions.data(), bounds.data(), slots.data(), rows.data(), logits.data()};
    if (tw_step(engine, &given)) fail("a good step was refused");
    positions[0] = kContext;
    if (!tw_step(engine, &given)) fail("a bad step was run");
    return logits;
}

std::vector<float> check(int kind, int arithmetic, int isa, int cache) {
    state = 1;
    Model model(kind, arithmetic, cache);
    TwProgram program = model.program(isa);
    char said[256] = "";
    void* engine = tw_open(&program, said, sizeof said);
    if (!engine) fail(said);
    step(engine, {0}, {0}, 400, false);
    step(engine, {0}, {400}, 130, false);
    tw_copy(engine, 0, 1, 530);
    step(engine, {2}, {0}, 9, false);
    std::vector<uint8_t> kept(tw_sequence_bytes(engine));
    tw_save(engine, 1, kept.data());
    std::vector<float> together = step(engine, {1, 0, 2}, {530, 530, 9}, 1, true);
    tw_load(engine, 1, kept.data());
    std::vector<float> alone = step(engine, {1}, {530}, 1, true);
    if (std::memcmp(alone.data(), together.data(), kVocab * 4)) fail("a row's bits depend on its batch");
    if (std::memcmp(alone.data(), together.data() + kVocab, kVocab * 4)) fail("a copy differs");
    for (float each : together)
        if (!(each == each)) fail("no number");
    std::vector<uint8_t> by_token(3 * kept.size());
    tw_keep_rows(engine, by_token.data());
    std::vector<float> drafted = step(engine, {1}, {531}, 3, true);
    tw_keep_rows(engine, nullptr);
    tw_save(engine, 1, kept.data());
    if (std::memcmp(kept.data(), by_token.data() + 2 * kept.size(), kept.size())) fail("the last state is not the slot's");
    tw_load(engine, 1, by_token.data());
    step(engine, {1}, {532}, 1, true);
    if (step(engine, {1}, {533}, 1, true) != drafted) fail("the state after a token differs");
    tw_clear(engine, 0);
    step(engine, {0}, {0}, 3, false);
    if (tw_slot_bytes(engine, 20) <= 0) fail("no bytes");
    tw_close(engine);
    return together;
}

// Replace a word in a structure by a limit, a neighbor, or a word from another place.
void mutate(Model& model, TwProgram& program) {
    static const int32_t edges[] = {-1, 0, 1, 2, 3, 5, 7, 8, 10, 15, 16, 17, 24, 31, 32, 33, 40, 60, 64, 1 << 12, 1 << 16, 1 << 20, 1 << 24, INT32_MAX, INT32_MIN};
    const uint32_t where = number() >> 16 & 15;
    TwInstruction& each = model.instructions[(number() >> 8) % model.instructions.size()];
    int32_t* words = (int32_t*)&each;
    size_t count = sizeof each / 4;
    if (where == 0) words = (int32_t*)&model.tensors[(number() >> 8) % model.tensors.size()], count = 3;
    if (where == 1) words = (int32_t*)model.states, count = sizeof model.states / 4;
    if (where == 2) words = model.widths.data(), count = model.widths.size();
    if (where == 3) words = &program.isa, count = 4;  // also slots, context and tokens per step
    int32_t& word = words[(number() >> 8) % count];
    switch (number() >> 20 & 3) {
        case 0: word = (int32_t)((uint32_t)word + (number() >> 16 & 1 ? 1u : ~0u)); break;
        case 1: word = ((int32_t*)&model.instructions[(number() >> 8) % model.instructions.size()])[&word - words >= (int)(sizeof each / 4) ? 0 : &word - words]; break;
        default: word = edges[(number() >> 8) % (sizeof edges / 4)];
    }
}

// An accepted program stays within its memory.
void run_mutated(const TwProgram& program, int32_t width) {
    char said[256] = "";
    void* engine = tw_open(&program, said, sizeof said);
    if (!engine) return (void)(said[0] || (fail("refused without a word"), 0));
    std::vector<float> logits((size_t)12 * std::max(width, 1));
    const int32_t tokens[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, positions[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2};
    const int32_t bounds[3] = {0, 9, 12}, slots[2] = {0, 1}, rows[2] = {8, 11}, later[2] = {9, 3}, ones[3] = {0, 1, 2}, last[2] = {0, 1};
    TwStep prompt{12, 2, 2, 0, tokens, positions, bounds, slots, rows, logits.data()};
    TwStep decode{2, 2, 2, 1, tokens, later, ones, slots, last, logits.data()};
    tw_step(engine, &prompt);
    tw_step(engine, &decode);
    if (program.max_num_seqs > 1 && program.max_context > 9) tw_copy(engine, 0, 1, 9);
    tw_clear(engine, 0);
    tw_close(engine);
}

void fuzz(int count, int seed) {
    for (int i = 0; i < count; i++) {
        state = 1;
        const int kind = i % TW_VECTOR;
        Model model(kind, tw::has_arithmetic(kind, TW_AS_INT8) ? TW_AS_INT8 : tw::has_arithmetic(kind, TW_AS_BF16) ? TW_AS_BF16 : TW_AS_FP32, i % TW_NUM_CACHES);
        state = (uint32_t)(seed + i) * 2654435761u;
        for (int same = 0; same < 20; same++) {
            Model changed = model;
            TwProgram program = changed.program((int)(number() >> 20) % (tw_best_isa() + 1));
            for (uint32_t changes = 1 + (number() >> 24 & 1); changes; changes--) mutate(changed, program);
            run_mutated(program, program.logits >= 0 && program.logits < program.num_buffers ? program.widths[program.logits] % (1 << 24) : 0);
        }
    }
}

}  // namespace

constexpr int kCaches[TW_NUM_ARITHMETICS] = {TW_CACHE_FP32, TW_CACHE_BF16, TW_CACHE_BFP8};

int main(int argc, char** argv) {
    if (argc > 1) {
        fuzz(std::atoi(argv[1]), argc > 2 ? std::atoi(argv[2]) : 0);
        std::printf("ok\n");
        return 0;
    }
    for (int kind = TW_FP32; kind < TW_VECTOR; kind += TW_EVERY)
        for (int arithmetic = 0; arithmetic < TW_NUM_ARITHMETICS; arithmetic++) {
            if (!tw::has_arithmetic(kind, arithmetic)) continue;
            std::vector<float> first;
            for (int isa = 0; isa <= tw_best_isa(); isa++) {
                if (TW_SKIPPED >> isa & 1) continue;
                std::vector<float> found = check(kind, arithmetic, isa, kCaches[arithmetic]);
                if (isa && found != first) fail("instruction sets differ");
                first = found;
            }
        }
    std::printf("ok\n");
}
