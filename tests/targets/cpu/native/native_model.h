// A small model of random weights on the native library: its layer has attention, linear attention, a
// dense product and experts, all of one kind of weight in one arithmetic.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "interface.h"
#include "panels.h"

namespace {

constexpr int kWidth = 40, kHeads = 4, kKv = 2, kDim = 10, kInner = 56, kVocab = 37, kSlots = 3, kContext = 640;
constexpr int kExperts = 5, kChosen = 2, kSize = 24, kKeyHeads = 1, kValueHeads = 2, kKeyDim = 10, kValueDim = 20, kTaps = 3;
constexpr int kChannels = 2 * kKeyHeads * kKeyDim + kValueHeads * kValueDim, kValues = kValueHeads * kValueDim;

uint32_t state = 1;
uint32_t number() { return state = state * 1664525u + 1013904223u; }

struct Model {
    std::vector<std::vector<uint8_t>> data;
    std::vector<TwTensor> tensors;
    std::vector<TwInstruction> instructions;
    std::vector<int32_t> widths{kWidth, (kHeads + 2 * kKv) * kDim, kHeads * kDim, kInner, kWidth, kVocab,
                                kChannels + 2 * kValueHeads + kValues, kChannels, kValues, kExperts, kChosen * kSize, kWidth, 1};
    TwState states[3];

    int32_t add(int kind, int rows, int columns, uint64_t bytes) {
        data.emplace_back(bytes + 64);
        uint8_t* at = (uint8_t*)(((uintptr_t)data.back().data() + 63) / 64 * 64);
        tensors.push_back({kind, rows, columns, at, bytes});
        return (int32_t)tensors.size() - 1;
    }

    int32_t vector(int count) {
        int32_t index = add(TW_VECTOR, count, 1, (uint64_t)count * 4);
        for (int i = 0; i < count; i++) ((float*)tensors[index].data)[i] = 0.1f + (float)(number() >> 8) * 0x1p-24f;
        return index;
    }

    int32_t weight(int kind, int rows, int columns, bool paired, int experts = 1) {
        tw::PanelSize size = tw::panel_size(kind, columns);
        int64_t panels = tw::num_panels(rows, paired) * experts;
        int32_t index = add(kind, rows * experts, columns, panels * size.total);
        for (int64_t p = 0; p < panels; p++) {
            uint8_t* panel = (uint8_t*)tensors[index].data + p * size.total;
            for (int64_t i = 0; i < size.total; i++) panel[i] = (uint8_t)(number() >> 24);
            if (kind == TW_FP32)
                for (int64_t i = 0; i < size.codes / 4; i++) ((float*)panel)[i] = ((float)(number() >> 8) * 0x1p-24f - 0.5f) / 4;
            if (kind == TW_FP16)  // some are smaller than the smallest normal number
                for (int64_t i = 0; i < size.codes / 2; i++) ((uint16_t*)panel)[i] &= 0xb3ff;
            if (kind == TW_BF16)
                for (int64_t i = 0; i < size.codes / 2; i++) {  // some have other upper bytes; a table has so many that it is not packed
                    const bool other = number() >> 8 < (rows == kVocab ? 1u << 21 : 1u << 16);
                    ((uint16_t*)panel)[i] = (uint16_t)(other ? number() >> 16 & 0xbcff : 0x3c00 | (number() >> 16 & 0x81ff));
                }
            for (int64_t i = size.codes; i < size.total; i++)  // small scales of float16, or exponents
                panel[i] = kind == TW_BFP8 || kind == TW_BFP4 ? (uint8_t)(117 + number() % 3) : (i % 2 ? 0x14 : 0x31);
            if (kind == TW_FP8 || kind == TW_NVFP4 || kind == TW_NF4)
                for (int64_t i = size.codes; i < size.total; i += 4) *(float*)(panel + i) = 0x1p-14f * (float)(1 + number() % 8);
        }
        return index;
    }

    void append(TwOp op, TwPlace out, TwPlace x, int32_t weight, int32_t norm, int arithmetic, int flags = 0) {
        TwInstruction each{};
        each.op = op, each.out = out, each.x = x, each.y = each.z = each.gate = {-1, 0, 0}, each.flags = flags;
        each.weight = weight, each.norm = norm, each.bias = each.other = -1;
        each.arithmetic[0] = each.arithmetic[1] = arithmetic;
        each.eps = 1e-5f, each.scale = 0.3f, each.factor = 1.0f, each.num_heads = kHeads;
        instructions.push_back(each);
    }

    void append_delta(int kind, int arithmetic, TwPlace x) {
        const int a = kChannels, b = a + kValueHeads, z = b + kValueHeads;
        const TwPlace all{6, 0, widths[6]}, qkv{7, 0, kChannels}, out{8, 0, kValues};
        states[1] = {TW_WINDOW, 0, kChannels, kTaps - 1, 0, 0};
        states[2] = {TW_MATRIX, 0, kValueHeads, kKeyDim, kValueDim, 0};
        append(TW_LINEAR, all, x, weight(kind, widths[6], kWidth, false), vector(kWidth), arithmetic);
        append(TW_CONVOLVE, qkv, {6, 0, kChannels}, vector(kTaps * kChannels), -1, 0);
        instructions.back().state = 1;
        append(TW_DELTA_RULE, out, qkv, -1, vector(kValueDim), 0);
        TwInstruction& rule = instructions.back();
        rule.y = {6, a, kValueHeads}, rule.z = {6, b, kValueHeads}, rule.gate = {6, z, kValues};
        rule.bias = vector(kValueHeads), rule.other = vector(kValueHeads), rule.state = 2, rule.num_key_heads = kKeyHeads;
        append(TW_LINEAR, x, out, weight(kind, kWidth, kValues, false), -1, arithmetic, TW_RESIDUAL);
    }

    void append_experts(int kind, int arithmetic, TwPlace x) {
        const TwPlace none{-1, 0, 0}, router{9, 0, kExperts}, inner{10, 0, kChosen * kSize}, normed{11, 0, kWidth}, gate{12, 0, 1};
        const size_t first = instructions.size();
        append(TW_NORM, normed, x, -1, vector(kWidth), 0);
        append(TW_LINEAR, router, normed, weight(TW_FP32, kExperts, kWidth, false), -1, 0);
        append(TW_LINEAR, gate, normed, weight(TW_FP32, 1, kWidth, false), -1, 0);
        append(TW_ROUTE, none, router, -1, -1, 0, TW_RENORMALISE);
        append(TW_EXPERTS, inner, normed, weight(kind, 2 * kSize, kWidth, true, kExperts), -1, arithmetic, TW_PAIRED);
        append(TW_EXPERT_SUM, x, inner, weight(kind, kWidth, kSize, false, kExperts), -1, arithmetic, TW_RESIDUAL);
        instructions.back().y = normed, instructions.back().gate = gate;
        for (size_t i = first; i < instructions.size(); i++) instructions[i].num_experts = kExperts, instructions[i].top_k = kChosen;
    }

    Model(int kind, int arithmetic, int cache) {
        const TwPlace x{0, 0, kWidth}, qkv{1, 0, widths[1]}, o{2, 0, widths[2]}, inner{3, 0, kInner}, last{4, 0, kWidth}, logits{5, 0, kVocab};
        states[0] = {TW_KEYS_VALUES, cache, kKv, kDim, 0, cache == TW_CACHE_FP32 ? 0 : 7};
        append(TW_EMBED, x, {-1, 0, 0}, weight(kind, kVocab, kWidth, false), -1, 0);
        append(TW_LINEAR, qkv, x, weight(kind, widths[1], kWidth, false), vector(kWidth), arithmetic);
        append(TW_ATTEND, o, qkv, -1, -1, 0);
        instructions.back().other = vector(kDim / 2);
        append(TW_LINEAR, x, o, weight(kind, kWidth, widths[2], false), -1, arithmetic, TW_RESIDUAL);
        append_delta(kind, arithmetic, x);
        append(TW_LINEAR, inner, x, weight(kind, 2 * kInner, kWidth, true), vector(kWidth), arithmetic, TW_PAIRED);
        append(TW_LINEAR, x, inner, weight(kind, kWidth, kInner, false), -1, arithmetic, TW_RESIDUAL);
        append_experts(kind, arithmetic, x);
        append(TW_GATHER, last, x, -1, -1, 0);
        append(TW_LINEAR, logits, last, weight(kind, kVocab, kWidth, false), vector(kWidth), arithmetic);
    }

    TwProgram program(int isa) {
        return {sizeof(TwProgram), TW_VERSION, sizeof(TwInstruction), sizeof(TwTensor), 3, isa, kSlots, kContext, 512,
                (int32_t)instructions.size(), (int32_t)tensors.size(), (int32_t)widths.size(), 3, 5, isa > 0,
                instructions.data(), tensors.data(), widths.data(), states};
    }
};

}  // namespace
