// What experts and linear attention need of a program.

#include "check.h"

namespace tw {
namespace {

void check_route(const Checked& checked, const TwInstruction& each, Routed& routed) {
    checked.place(each.x, "x");
    checked.holds(is_between(each.num_experts, 1, 1 << 16) && each.x.width == each.num_experts, "experts");
    checked.holds(each.top_k >= 1 && each.top_k <= kMostChosen && each.top_k <= each.num_experts, "experts of a token");
    if (each.bias >= 0) checked.vector(each.bias, each.num_experts, "bias");
    routed = {each.num_experts, each.top_k};
}

void check_experts(const Checked& checked, const TwInstruction& each, const Routed& routed) {
    const bool paired = each.flags & TW_PAIRED, sums = each.op == TW_EXPERT_SUM;
    checked.place(each.x, "x");
    checked.holds(routed.top_k > 0 && each.num_experts == routed.num_experts && each.top_k == routed.top_k, "its router");
    const TwTensor& weight = checked.tensor(each.weight, "weight");
    const int64_t num_results = sums ? each.out.width : each.out.width / each.top_k, rows = num_results * (paired ? 2 : 1);
    checked.holds(weight.kind != TW_VECTOR && weight.rows == rows * each.num_experts && !(sums && paired), "weight");
    checked.holds(sums || num_results * each.top_k == each.out.width, "width");
    checked.holds(each.x.width == weight.columns || each.x.width == (int64_t)weight.columns * each.top_k, "width of x");
    const uint64_t wanted = num_panels(rows, paired) * panel_size(weight.kind, weight.columns).total * each.num_experts;
    checked.holds(weight.num_bytes == wanted, "bytes of its weight");
    checked.arithmetics(each, weight.kind);
    if (each.bias >= 0) checked.vector(each.bias, num_panels(rows, paired) * kLanes * each.num_experts, "bias");
    if (each.y.buffer < 0 || !sums) return;
    checked.place(each.y, "shared");
    checked.place(each.gate, "gate");
    checked.holds(each.y.width == each.out.width && each.gate.width == 1, "width of shared");
}

void check_convolve(const Checked& checked, const TwInstruction& each) {
    const TwState& state = checked.state(each.state, TW_WINDOW);
    checked.place(each.x, "x");
    checked.holds(each.x.width == state.num_heads && each.out.width == state.num_heads, "width");
    checked.vector(each.weight, (int64_t)state.num_heads * (state.head_dim + 1), "weight");
}

void check_delta_rule(const Checked& checked, const TwInstruction& each) {
    const TwState& state = checked.state(each.state, TW_MATRIX);
    const int64_t heads = state.num_heads, key_heads = each.num_key_heads;
    for (const TwPlace* place : {&each.x, &each.y, &each.z, &each.gate}) checked.place(*place, "operands");
    checked.holds(is_between(key_heads, 1, heads + 1) && heads % key_heads == 0, "heads");
    checked.holds(each.x.width == 2 * key_heads * state.head_dim + heads * state.value_dim, "width");
    checked.holds(each.y.width == heads && each.z.width == heads, "width of its gates");
    checked.holds(each.gate.width == heads * state.value_dim && each.out.width == each.gate.width, "width of values");
    checked.vector(each.bias, heads, "decay");
    checked.vector(each.other, heads, "bias of the decay");
    checked.vector(each.norm, state.value_dim, "norm");
}

}  // namespace

void check_mixer(const Checked& checked, const TwInstruction& each, Routed& routed) {
    switch (each.op) {
        case TW_ROUTE: return check_route(checked, each, routed);
        case TW_EXPERTS: case TW_EXPERT_SUM: return check_experts(checked, each, routed);
        case TW_CONVOLVE: return check_convolve(checked, each);
        case TW_DELTA_RULE: return check_delta_rule(checked, each);
        default: checked.holds(false, "no such operation");
    }
}

}  // namespace tw
