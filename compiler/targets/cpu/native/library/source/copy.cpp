// Copying of weights to large pages. bfloat16 is also compressed: a panel has only several different
// upper bytes (sign and high exponent bits).

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "executor.h"

namespace tw {
namespace {

constexpr int64_t kLargePage = 2 << 20, kPlaces = 16, kNoPlace = 255;

// Map the panel's most frequent upper bytes to indices. Other bytes have none.
void find_places(const uint8_t* panel, int64_t padded, uint8_t* table, uint8_t (&places)[256]) {
    const int64_t step = padded < 512 ? 1 : 4;  // column pairs
    int32_t seen[256] = {}, order[256];
    for (int64_t pair = 0; pair < padded / 2; pair += step)
        for (int64_t i = 1; i < 64; i += 2) seen[panel[pair * 64 + i]]++;
    std::iota(order, order + 256, 0);
    std::partial_sort(order, order + kPlaces, order + 256, [&](int32_t a, int32_t b) { return seen[a] != seen[b] ? seen[a] > seen[b] : a < b; });
    std::memset(places, kNoPlace, sizeof places);
    for (int64_t i = 0; i < kPlaces; i++) {
        table[i] = (uint8_t)order[i];
        places[order[i]] = (uint8_t)i;
    }
}

// Compress a BF16 panel into `to`, if possible.
bool pack(const uint8_t* panel, int64_t columns, uint8_t* to) {
    const int64_t padded = rounded(columns, kBlock);
    uint8_t places[256];
    std::memset(to, 0, kPackedHead);
    find_places(panel, padded, to + kPackedTable, places);
    Exception* exceptions = (Exception*)(to + panel_size(kPacked, columns).codes);
    uint32_t count = 0;
    for (int64_t group = 0; group < padded / 8; group++) {
        const uint8_t* from = panel + group * 256;
        uint8_t* out = to + kPackedHead + group * kPackedGroup;
        uint8_t all = 0;
        for (int64_t i = 0; i < 64; i++) {  // from pairs 1 and 2, and from pairs 3 and 4
            const int64_t at = i % 16 / 8 * 64 + (i / 16 * 8 + i % 8) * 2;
            const uint8_t low = places[from[at + 1]], high = places[from[at + 129]];
            out[i] = from[at];
            out[64 + i] = from[at + 128];
            out[128 + i] = (uint8_t)((low & 15) | high << 4);
            all |= low | high;
        }
        if (all < kPlaces) continue;
        for (int64_t i = 0; i < 128; i++) {
            if (places[from[2 * i + 1]] != kNoPlace) continue;
            if (count == most_exceptions(padded)) return false;
            uint16_t value;
            std::memcpy(&value, from + 2 * i, 2);
            exceptions[count++] = {(uint32_t)(group * 128 + i), value};
        }
    }
    std::memcpy(to, &count, 4);
    return true;
}

// A copy operation. `packs`: bfloat16 tensors without an incompressible panel so far.
struct Copy {
    Engine& engine;
    bool may_pack;
    std::vector<uint8_t*> to;               // per tensor, or null
    std::vector<std::atomic<bool>> packs;   // per tensor
};

// Release whole pages in a range. The file still has the contents.
void let_go(const uint8_t* begin, const uint8_t* end) {
    const int64_t page = sysconf(_SC_PAGESIZE), first = rounded((int64_t)begin, page), last = (int64_t)end / page * page;
    if (first < last) madvise((void*)first, last - first, MADV_DONTNEED);
}

// Copy panel pairs [first, last), in chunks with a large page's size. File pages
// are released meanwhile, and read again if the tensor is incompressible.
void copy_pairs(Copy& copy, size_t index, int64_t first, int64_t last, int64_t unit) {
    const TwTensor& each = copy.engine.tensors[index];
    const uint8_t* from = (const uint8_t*)each.data;
    const bool lets_go = copy.engine.program.large_pages == 2;
    if (copy.may_pack && each.kind == TW_BF16) {
        const int64_t own = panel_size(kPacked, each.columns).total, padded = unit / 2;
        const int64_t some = std::max<int64_t>(1, kLargePage / padded);  // panels
        for (int64_t panel = 2 * first; panel < 2 * last && copy.packs[index]; panel++) {
            if (!pack(from + panel * padded, each.columns, copy.to[index] + panel * own)) copy.packs[index] = false;
            const int64_t done = panel + 1 - 2 * first;
            if (lets_go && done % some == 0) let_go(from + (panel + 1 - some) * padded, from + (panel + 1) * padded);
        }
        if (lets_go) let_go(from + first * unit, from + last * unit);  // includes pages between two pairs
        return;
    }
    for (int64_t at = first * unit; at < last * unit; at += kLargePage) {
        const int64_t end = std::min(at + kLargePage, last * unit);
        std::memcpy(copy.to[index] + at, from + at, end - at);
        if (lets_go) let_go(from + at, from + end);
    }
}

// A thread copies its own panels first, so that they are in its nearest memory.
void copy_own(void* given, int thread) {
    Copy& copy = *(Copy*)given;
    const int64_t num_threads = copy.engine.pool->size();
    for (size_t i = 0; i < copy.to.size(); i++) {
        if (!copy.to[i]) continue;
        const TwTensor& each = copy.engine.tensors[i];
        const int64_t unit = each.kind == TW_VECTOR ? (int64_t)each.num_bytes : 2 * panel_size(each.kind, each.columns).total;
        const int64_t count = (int64_t)each.num_bytes / unit;
        copy_pairs(copy, i, thread * count / num_threads, (thread + 1) * count / num_threads, unit);
    }
}

int64_t packed_bytes(const TwTensor& each) {
    return (int64_t)each.num_bytes / panel_size(TW_BF16, each.columns).total * panel_size(kPacked, each.columns).total;
}

// Allocate the tensors marked in `to` consecutively in `memory`, and copy them.
void copy_into(Memory& memory, Copy& copy) {
    std::vector<int64_t> offsets;
    int64_t total = 0;
    for (size_t i = 0; i < copy.to.size(); i++) {
        const TwTensor& each = copy.engine.tensors[i];
        offsets.push_back(total);
        if (copy.to[i]) total += rounded(copy.may_pack && each.kind == TW_BF16 ? packed_bytes(each) : (int64_t)each.num_bytes, 64);
    }
    if (!total) return;
    memory = Memory(total + kLargePage);
    memory.use_large_pages();
    uint8_t* base = (uint8_t*)rounded((int64_t)memory.data(), kLargePage);
    for (size_t i = 0; i < copy.to.size(); i++)
        if (copy.to[i]) copy.to[i] = base + offsets[i];
    copy.engine.pool->run(copy_own, &copy);
}

// Tensors to copy: all but the embedding in a mapped file. A step reads only some rows.
std::vector<uint8_t*> to_copy(const Engine& engine) {
    std::vector<uint8_t*> found(engine.tensors.size(), kNowhere);
    if (engine.program.large_pages != 2) return found;
    for (const TwInstruction& each : engine.instructions)
        if (each.op == TW_EMBED) found[each.weight] = nullptr;
    for (const TwInstruction& each : engine.instructions)
        if (each.op != TW_EMBED && each.weight >= 0) found[each.weight] = kNowhere;
    return found;
}

}  // namespace

// A tensor with an incompressible panel is copied unchanged, after all other tensors.
void copy_weights(Engine& engine) {
    const size_t count = engine.tensors.size();
    Copy first{engine, true, to_copy(engine), std::vector<std::atomic<bool>>(count)};
    Copy rest{engine, false, std::vector<uint8_t*>(count), std::vector<std::atomic<bool>>(count)};
    for (size_t i = 0; i < count; i++) first.packs[i] = first.to[i] && engine.tensors[i].kind == TW_BF16;
    copy_into(engine.weights, first);
    for (size_t i = 0; i < count; i++)
        if (first.to[i] && engine.tensors[i].kind == TW_BF16 && !first.packs[i]) rest.to[i] = kNowhere;
    copy_into(engine.unpacked, rest);
    for (size_t i = 0; i < count; i++) {
        TwTensor& each = engine.tensors[i];
        if (!first.to[i]) continue;
        each.data = rest.to[i] ? rest.to[i] : first.to[i];
        if (!first.packs[i]) continue;
        each.num_bytes = (uint64_t)packed_bytes(each);
        each.kind = kPacked;
    }
}

}  // namespace tw
