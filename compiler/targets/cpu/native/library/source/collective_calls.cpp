// Connection of ranks, and their calls outside of steps.

#include "executor.h"

using tw::Engine;

extern "C" {

int32_t tw_join(void* engine, const TwPeers* peers) {
    Engine& own = *(Engine*)engine;
    if (peers->count < 2 || peers->count > 64 || peers->rank < 0 || peers->rank >= peers->count) return 1;
    if (peers->limit_ms < 1 || peers->looks < 0 || peers->most_looks < peers->looks || own.exchange) return 1;
    int64_t width = 0;
    for (int32_t i = 0; i < peers->count; i++) {
        if (peers->logit_widths[i] < 0 || (i != peers->rank && peers->sockets[i] < 0)) return 1;
        width += peers->logit_widths[i];
    }
    const TwInstruction& last = own.instructions.back();
    if (last.op == TW_GATHER_LOGITS && (width != last.out.width || peers->logit_widths[peers->rank] != last.x.width)) return 1;
    own.logit_widths.assign(peers->logit_widths, peers->logit_widths + peers->count);
    if (peers->most_looks > peers->looks) own.pool->least_looks = 4096;  // cores enough for all
    own.exchange = std::make_unique<tw::Exchange>(*peers, own.max_blocks);
    return 0;
}

void tw_set_hops(void* engine, int64_t two_hops_from) {
    if (auto* exchange = ((Engine*)engine)->exchange.get()) exchange->two_hops_from = two_hops_from;
}

void tw_exchanged(void* engine, TwExchanged* found) {
    const tw::Exchange* exchange = ((Engine*)engine)->exchange.get();
    *found = exchange ? TwExchanged{exchange->number, exchange->num_bytes, exchange->nanoseconds, exchange->failed} : TwExchanged{0, 0, 0, -1};
}

int32_t tw_all_reduce(void* engine, float* values, int32_t rows, int32_t width, int32_t wire) {
    Engine& own = *(Engine*)engine;
    if (!own.exchange || rows < 1 || width < 1 || wire < 0 || wire >= TW_NUM_WIRES) return 1;
    if (tw::rounded(width, tw::kWireBlock) / tw::kWireBlock * (int64_t)rows > own.max_blocks) return 1;
    return own.exchange->add(values, rows, width, wire) ? 0 : 2;
}

}
