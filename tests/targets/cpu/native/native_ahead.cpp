// Runs matmuls with kernels that record their prefetches. Every thread must prefetch all of its own
// panels before it multiplies them, and nothing for panels of other threads. Large panels prefetch
// nearby columns, and the matmul before them prefetches their first columns.

#include <cstdio>
#include <cstdlib>
#include <map>

#include "linear.cpp"

namespace tw {

Memory::Memory(int64_t num_bytes) : data_((uint8_t*)std::calloc(1, num_bytes + 64)), num_bytes_(num_bytes) {}
Memory::Memory(Memory&& other) noexcept : data_(other.data_), num_bytes_(other.num_bytes_) { other.data_ = nullptr; }
Memory::~Memory() { std::free(data_); }
Exchange::~Exchange() = default;

namespace {

std::map<const uint8_t*, int> fetched;  // lines
const uint8_t *own_begin, *own_end;
int num_failed = 0;
constexpr int64_t kDistance = 16384, kLarge = 1 << 18;  // bytes

void fail(const char* what, int64_t number) {
    std::printf("%s: %lld\n", what, (long long)number);
    num_failed++;
}

void quantise(const float*, int64_t, int32_t, void*, BlockTerms*) {}

// As `fetch` in products.inl.
void product(const PanelPair& pair, const Operand& x, int64_t, const Result&) {
    const Ahead& ahead = pair.ahead;
    const int64_t panel_bytes = panel_size(pair.kind, pair.columns).total, num_bytes = 2 * panel_bytes;
    if (panel_bytes > kLarge) {
        if (ahead.data != pair.first + kDistance || ahead.num_streams != 2) fail("another distance", ahead.data - pair.first);
        for (int64_t at = 0; pair.first == own_begin && at < kDistance; at += 64)
            if (fetched[pair.first + at] != 1 || fetched[pair.second + at] != 1) return fail("first columns are not prefetched once", at);
        return;
    }
    if (pair.first < own_begin || pair.first >= own_end) {
        if (ahead.num_bytes) fail("prefetches for another thread", ahead.num_bytes);
        return;
    }
    for (int64_t at = 0; at < num_bytes; at += 64)
        if (fetched[pair.first + at] < 1) return fail("a line is not prefetched", at);
    for (int64_t block = 0; block < x.num_blocks; block++)
        for (int64_t at = rounded(block * ahead.step, 64); at < std::min((block + 1) * ahead.step, ahead.num_bytes); at += 64)
            for (int64_t i = 0; i < ahead.num_streams; i++) fetched[ahead.data + i * ahead.stride + at]++;
}

}  // namespace
}  // namespace tw

using namespace tw;

int main() {
    Kernels kernels{};
    kernels.quantise = quantise;
    kernels.product_int8 = product;
    const int32_t shapes[][2] = {{960, 576}, {576, 576}, {3072, 576}, {32, 576}, {576, 1536}, {96, 32768}, {96, 200}};
    for (int kind : {TW_Q40, TW_Q80})
        for (int num_threads : {1, 2, 3}) {
            Engine engine;
            engine.kernels = &kernels;
            engine.pool = std::make_unique<Pool>(num_threads);
            engine.pieces = std::vector<Pieces>(num_threads);
            engine.program = {};
            engine.program.logits = -1;
            engine.buffers.emplace_back(1 << 18);
            engine.widths.push_back(1 << 15);
            for (int i = 0; i < num_threads; i++) engine.scratch.emplace_back(6 << 20);
            std::vector<std::vector<uint8_t>> data;
            for (const auto& shape : shapes) {
                data.emplace_back(num_panels(shape[0], false) * panel_size(kind, shape[1]).total + 64);
                uint8_t* at = (uint8_t*)rounded((int64_t)data.back().data(), 64);
                TwInstruction each{};
                each.op = TW_LINEAR, each.weight = (int32_t)engine.tensors.size(), each.norm = each.bias = -1;
                each.x = {0, 0, shape[1]}, each.out = {0, 0, shape[0]};
                each.arithmetic[0] = each.arithmetic[1] = TW_AS_INT8;
                engine.tensors.push_back({kind, shape[0], shape[1], at, data.back().size() - 64});
                engine.instructions.push_back(each);
            }
            TwStep step{};
            uint32_t turns = 0;
            const size_t count = engine.instructions.size();
            for (int thread = 0; thread < num_threads; thread++) {
                fetched.clear();
                bool is_first = true;  // the thread has multiplied nothing just before
                for (size_t i = 0; i < 2 * count; i++) {
                    const TwInstruction &each = engine.instructions[i % count], &next = engine.instructions[(i + 1) % count];
                    Worker worker{engine, step, thread, 1, turns};
                    const Panels panels(worker, each);
                    own_begin = panels.pair(panels.own.begin), own_end = panels.pair(panels.own.end);
                    const bool is_large = panels.size.total > kLarge;
                    if (is_first && !is_large)
                        for (const uint8_t* at = own_begin; at < own_end; at += 64) fetched[at] = 1;
                    run_linear(worker, each, next);
                    turns = worker.turns;
                    int64_t num_twice = 0;
                    if (!is_large)
                        for (const uint8_t* at = own_begin; at < own_end; at += 64) num_twice += fetched[at] > 1;
                    if (!is_first && num_twice > 4 * panels.num_regions) fail("lines are prefetched twice", num_twice);
                    is_first = own_begin == own_end || is_large;
                    if (is_first) fetched.clear();
                    else for (const uint8_t* at = own_begin; at < own_end; at += 64) fetched.erase(at);
                }
            }
        }
    return num_failed ? 1 : 0;
}
