// A single thread per step reads and writes sockets. All threads share rounding and adding.

#include "collectives.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <numeric>

#include "executor.h"

namespace tw {
namespace {

constexpr int64_t kHeader = 8;
constexpr int64_t kGroup = 32;    // blocks that a thread takes at a time
constexpr int kLeastLooks = 4;

uint16_t to_half(float value) {  // to nearest, halves to even; too large is infinite
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return (uint16_t)(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (magnitude < 0x38800000) {  // no normal number there
        float scaled;
        const uint32_t one = 0x3f000000;  // 0.5: its last bit is worth 2^-24
        std::memcpy(&scaled, &magnitude, 4);
        float half;
        std::memcpy(&half, &one, 4);
        scaled += half;
        std::memcpy(&bits, &scaled, 4);
        return (uint16_t)(sign | (bits - one));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (rounded - 0x38000000) >> 13);
}

float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    float found;
    if (magnitude < 0x400) {
        found = (float)magnitude * 0x1p-24f;
    } else {
        uint32_t bits = magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000 : (magnitude << 13) + 0x38000000;
        std::memcpy(&found, &bits, 4);
    }
    return sign ? -found : found;
}

// The bits of magnitudes order like the magnitudes. Rounding them needs no library call.
void to_q80(const float* x, uint8_t* out) {
    int32_t most_bits = 0, quantized[kWireBlock];
    std::memcpy(quantized, x, sizeof quantized);
    for (const int32_t bits : quantized) most_bits = std::max(most_bits, bits & 0x7fffffff);
    float most;
    std::memcpy(&most, &most_bits, 4);
    const float scale = most / 127.0f, inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    const uint16_t half = to_half(scale);
    std::memcpy(out, &half, 2);
    for (int i = 0; i < kWireBlock; i++) {  // halves away from zero
        const float exact = x[i] * inverse, magnitude = std::min(127.0f, std::fabs(exact));
        const int32_t whole = (int32_t)magnitude, rounded = whole + (magnitude - (float)whole >= 0.5f);
        quantized[i] = exact < 0.0f ? -rounded : rounded;
    }
    for (int i = 0; i < kWireBlock; i++) out[2 + i] = (uint8_t)(int8_t)quantized[i];
}

}  // namespace

int64_t wire_block_bytes(int32_t wire) { return wire == TW_WIRE_FP32 ? 128 : wire == TW_WIRE_BF16 ? 64 : 34; }

void to_wire(const float* x, int64_t count, int32_t wire, uint8_t* out) {
    float padded[kWireBlock] = {};
    if (count < kWireBlock) {
        std::memcpy(padded, x, count * 4);
        x = padded;
    }
    if (wire == TW_WIRE_FP32) {
        std::memcpy(out, x, 128);
    } else if (wire == TW_WIRE_BF16) {
        uint16_t found[kWireBlock];
        for (int i = 0; i < kWireBlock; i++) {
            uint32_t bits;
            std::memcpy(&bits, x + i, 4);
            found[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        }
        std::memcpy(out, found, 64);
    } else {
        to_q80(x, out);
    }
}

void from_wire(const uint8_t* x, int32_t wire, float* out) {
    if (wire == TW_WIRE_FP32) {
        std::memcpy(out, x, 128);
    } else if (wire == TW_WIRE_BF16) {
        uint16_t found[kWireBlock];
        std::memcpy(found, x, 64);
        for (int i = 0; i < kWireBlock; i++) {
            const uint32_t bits = (uint32_t)found[i] << 16;
            std::memcpy(out + i, &bits, 4);
        }
    } else {
        uint16_t half;
        std::memcpy(&half, x, 2);
        const float scale = from_half(half);
        for (int i = 0; i < kWireBlock; i++) out[i] = (float)(int8_t)x[2 + i] * scale;
    }
}

Exchange::Exchange(const TwPeers& peers, int64_t max_blocks)
    : rank(peers.rank), count(peers.count), two_hops_from(peers.two_hops_from), sockets_(peers.sockets, peers.sockets + peers.count), limit_(peers.limit_ms), looks_(peers.looks), most_looks_(peers.looks) {
    for (int i = 0; i <= count; i++) memories_.emplace_back(max_blocks * wire_block_bytes(TW_WIRE_FP32));
    for (int i = 0; i < count; i++) parts_.push_back(memories_[i].data());
    sums_ = memories_[count].data();
}

Exchange::~Exchange() = default;

bool Exchange::fail(int peer) {
    if (failed < 0) failed = peer;
    return false;
}

bool Exchange::send_some(Piece& piece, bool& moved) {
    const int64_t total = kHeader + piece.size;
    if (piece.done == total) return true;
    iovec parts[2];
    int num_parts = 0;
    if (piece.done < kHeader) parts[num_parts++] = {(uint8_t*)piece.header + piece.done, (size_t)(kHeader - piece.done)};
    const int64_t at = std::max<int64_t>(piece.done - kHeader, 0);
    if (at < piece.size) parts[num_parts++] = {piece.data + at, (size_t)(piece.size - at)};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    const ssize_t sent = sendmsg(sockets_[piece.peer], &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || fail(piece.peer);
    moved = moved || sent > 0;
    piece.done += sent;
    num_bytes += sent;
    return true;
}

bool Exchange::receive_some(Piece& piece, bool& moved) {
    const int64_t total = kHeader + piece.size;
    if (piece.done == total) return true;
    const uint32_t wanted[2] = {piece.header[0], piece.header[1]};
    iovec parts[2];
    int num_parts = 0;
    uint32_t header[2] = {wanted[0], wanted[1]};
    if (piece.done < kHeader) parts[num_parts++] = {(uint8_t*)header + piece.done, (size_t)(kHeader - piece.done)};
    const int64_t at = std::max<int64_t>(piece.done - kHeader, 0);
    if (at < piece.size) parts[num_parts++] = {piece.data + at, (size_t)(piece.size - at)};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    const ssize_t found = recvmsg(sockets_[piece.peer], &message, MSG_DONTWAIT);
    if (found == 0) return fail(piece.peer);
    if (found < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || fail(piece.peer);
    if (header[0] != wanted[0] || header[1] != wanted[1]) return fail(piece.peer);  // of another exchange
    moved = true;
    piece.done += found;
    return true;
}

bool Exchange::wait(const std::vector<Piece>& out, const std::vector<Piece>& in, Clock::time_point deadline) {
    std::vector<pollfd> sockets;
    std::vector<int> peers;
    for (const auto* pieces : {&out, &in})
        for (const Piece& each : *pieces) {
            if (each.done == kHeader + each.size) continue;
            sockets.push_back({sockets_[each.peer], (short)(pieces == &out ? POLLOUT : POLLIN), 0});
            peers.push_back(each.peer);
        }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left > 0 && poll(sockets.data(), sockets.size(), (int)left) != 0) return true;
    return Clock::now() < deadline || fail(peers.empty() ? 0 : peers[0]);
}

bool Exchange::move(std::vector<Piece>& out, std::vector<Piece>& in) {
    if (failed >= 0) return false;
    number++;
    const auto begin = Clock::now(), deadline = begin + limit_;
    for (auto* pieces : {&out, &in})
        for (Piece& each : *pieces) {
            each.header[0] = (uint32_t)number;
            each.header[1] = (uint32_t)each.size;
        }
    auto is_done = [](const std::vector<Piece>& pieces) {
        return std::all_of(pieces.begin(), pieces.end(), [](const Piece& each) { return each.done == kHeader + each.size; });
    };
    int looks = 0;
    while (!is_done(out) || !is_done(in)) {
        bool moved = false;
        for (Piece& each : out)
            if (!send_some(each, moved)) return false;
        for (Piece& each : in)
            if (!receive_some(each, moved)) return false;
        if (moved) {
            if (looks > 0) looks_ = std::min(2 * looks_, most_looks_);  // looking was enough
            looks = 0;
        } else if (looks < looks_) {
            looks++;
        } else {
            looks_ = std::max(looks_ / 2, std::min(kLeastLooks, most_looks_));
            looks = 0;
            if (!wait(out, in, deadline)) return false;
        }
    }
    nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
    return true;
}

bool Exchange::is_two_hops(int64_t num_blocks, int32_t wire) const {
    return count > 2 && num_blocks >= count && num_blocks * wire_block_bytes(wire) >= two_hops_from;
}

void Exchange::sum_block(int64_t block, int32_t wire, float* out) const {
    float values[64][kWireBlock];
    const int64_t at = block * wire_block_bytes(wire);
    for (int i = 0; i < count; i++) from_wire(parts_[i] + at, wire, values[i]);
    for (int left = count; left > 1; left = (left + 1) / 2)
        for (int i = 0; 2 * i < left; i++)
            for (int k = 0; k < kWireBlock; k++)
                values[i][k] = 2 * i + 1 < left ? values[2 * i][k] + values[2 * i + 1][k] : values[2 * i][k];
    std::memcpy(out, values[0], sizeof(values[0]));
}

bool Exchange::swap_all(int64_t num_blocks, int32_t wire) {
    const int64_t size = num_blocks * wire_block_bytes(wire);
    std::vector<Piece> out, in;
    for (int i = 1; i < count; i++) {
        const int to = (rank + i) % count, from = (rank + count - i) % count;
        out.push_back({to, parts_[rank], size, {}});
        in.push_back({from, parts_[from], size, {}});
    }
    return move(out, in);
}

bool Exchange::swap_chunks(int64_t num_blocks, int32_t wire) {
    const int64_t bytes = wire_block_bytes(wire), mine = first_of(rank, num_blocks);
    const int64_t mine_size = (first_of(rank + 1, num_blocks) - mine) * bytes;
    std::vector<Piece> out, in;
    for (int i = 1; i < count; i++) {
        const int to = (rank + i) % count, from = (rank + count - i) % count;
        const int64_t first = first_of(to, num_blocks), size = (first_of(to + 1, num_blocks) - first) * bytes;
        out.push_back({to, parts_[rank] + first * bytes, size, {}});
        in.push_back({from, parts_[from] + mine * bytes, mine_size, {}});
    }
    return move(out, in);
}

bool Exchange::spread_sums(int64_t num_blocks, int32_t wire) {
    const int64_t bytes = wire_block_bytes(wire), mine = first_of(rank, num_blocks);
    const int64_t mine_size = (first_of(rank + 1, num_blocks) - mine) * bytes;
    std::vector<Piece> out, in;
    for (int i = 1; i < count; i++) {
        const int to = (rank + i) % count, from = (rank + count - i) % count;
        const int64_t first = first_of(from, num_blocks), size = (first_of(from + 1, num_blocks) - first) * bytes;
        out.push_back({to, sums_ + mine * bytes, mine_size, {}});
        in.push_back({from, sums_ + first * bytes, size, {}});
    }
    return move(out, in);
}

// All threads' steps through a sum. `share(count, make)` distributes groups of blocks. At `meet`,
// all shared work is complete. `is_first` is true for the thread with the sockets.
template <class Read, class Write, class Share, class Meet>
void Exchange::reduce(int64_t rows, int64_t width, int32_t wire, bool is_first, Read read, Write write, Share share, Meet meet) {
    const int64_t row_blocks = rounded(width, kWireBlock) / kWireBlock, bytes = wire_block_bytes(wire), num_blocks = rows * row_blocks;
    const bool two_hops = is_two_hops(num_blocks, wire), rounds = count > 2 && wire != TW_WIRE_FP32;
    auto of_blocks = [&](int64_t first, int64_t last, auto make) {
        share((last - first + kGroup - 1) / kGroup, [&](int64_t group) {
            for (int64_t i = first + group * kGroup; i < std::min(first + (group + 1) * kGroup, last); i++) make(i);
        });
    };
    of_blocks(0, num_blocks, [&](int64_t block) {
        const int64_t at = block % row_blocks * kWireBlock;
        to_wire(read(block / row_blocks) + at, std::min(kWireBlock, width - at), wire, parts_[rank] + block * bytes);
    });
    meet();
    if (is_first) two_hops ? swap_chunks(num_blocks, wire) : swap_all(num_blocks, wire);
    meet();
    if (two_hops) {
        of_blocks(first_of(rank, num_blocks), first_of(rank + 1, num_blocks), [&](int64_t block) {
            float sum[kWireBlock];
            sum_block(block, wire, sum);
            to_wire(sum, kWireBlock, wire, sums_ + block * bytes);
        });
        meet();
        if (is_first) spread_sums(num_blocks, wire);
        meet();
    }
    of_blocks(0, num_blocks, [&](int64_t block) {
        float sum[kWireBlock];
        uint8_t sent[4 * kWireBlock];
        if (two_hops) {
            from_wire(sums_ + block * bytes, wire, sum);
        } else {
            sum_block(block, wire, sum);
            if (rounds) {  // as in two hops, so that their number changes no bit
                to_wire(sum, kWireBlock, wire, sent);
                from_wire(sent, wire, sum);
            }
        }
        const int64_t at = block % row_blocks * kWireBlock;
        write(block / row_blocks, at, std::min(kWireBlock, width - at), sum);
    });
}

bool Exchange::add(float* values, int64_t rows, int64_t width, int32_t wire) {
    auto write = [&](int64_t row, int64_t at, int64_t size, const float* sum) { std::memcpy(values + row * width + at, sum, size * 4); };
    auto share = [](int64_t size, auto make) { for (int64_t i = 0; i < size; i++) make(i); };
    reduce(rows, width, wire, true, [&](int64_t row) { return values + row * width; }, write, share, [] {});
    return failed < 0;
}

void run_all_reduce(Worker& worker, const TwInstruction& each) {
    const int64_t rows = worker.num_rows, width = each.x.width;
    const bool adds = each.flags & TW_RESIDUAL;
    const bool is_alone = rows * width <= 4 * kGroup * kWireBlock * worker.engine.pool->size();  // so little is one thread's work
    if (is_alone && worker.thread) return;
    auto read = [&](int64_t row) { return worker.at(each.x, row); };
    auto write = [&](int64_t row, int64_t at, int64_t size, const float* sum) {
        float* out = worker.at(each.out, row) + at;
        for (int64_t k = 0; k < size; k++) out[k] = adds ? out[k] + sum[k] : sum[k];
    };
    auto share = [&](int64_t size, auto make) {
        if (!is_alone) return worker.share(size, make);
        for (int64_t i = 0; i < size; i++) make(i);
    };
    worker.engine.exchange->reduce(rows, width, each.function, worker.thread == 0, read, write, share, [&] { if (!is_alone) worker.meet(); });
}

namespace {

// The best of a rank's own logits in a row. The first wins a tie, and NaN beats all numbers.
TwBest best_of(const float* logits, int64_t count, int32_t first) {
    TwBest found{-INFINITY, -1};
    for (int64_t i = 0; i < count; i++) {
        if (std::isnan(logits[i])) return {logits[i], (int32_t)(first + i)};
        if (logits[i] > found.value || found.token < 0) found = {logits[i], (int32_t)(first + i)};
    }
    return found;
}

}  // namespace

void run_gather_logits(Worker& worker, const TwInstruction& each) {
    if (worker.thread) return;
    Exchange& exchange = *worker.engine.exchange;
    const TwStep& step = worker.step;
    const int64_t rows = worker.num_rows, width = each.x.width;
    const int32_t* widths = worker.engine.logit_widths.data();
    const int32_t first_token = std::accumulate(widths, widths + exchange.rank, 0);
    std::vector<Exchange::Piece> out, in;
    std::vector<TwBest> own(rows);
    exchange.best.resize(rows * exchange.count);
    std::vector<std::vector<float>> parts(exchange.count);
    if (step.best) {
        const int64_t left = std::clamp<int64_t>(step.num_choosable - first_token, 0, width);
        for (int64_t row = 0; row < rows; row++) own[row] = best_of(worker.at(each.x, row), left, first_token);
    } else {
        std::vector<float>& flat = parts[exchange.rank];
        flat.resize(rows * width);
        for (int64_t row = 0; row < rows; row++) std::memcpy(flat.data() + row * width, worker.at(each.x, row), width * 4);
    }
    if (exchange.rank) {
        uint8_t* data = step.best ? (uint8_t*)own.data() : (uint8_t*)parts[exchange.rank].data();
        out.push_back({0, data, step.best ? rows * (int64_t)sizeof(TwBest) : rows * width * 4, {}});
        exchange.move(out, in);
        return;
    }
    for (int i = 1; i < exchange.count; i++) {
        if (!step.best) parts[i].resize(rows * widths[i]);
        uint8_t* data = step.best ? (uint8_t*)(exchange.best.data() + i * rows) : (uint8_t*)parts[i].data();
        in.push_back({i, data, step.best ? rows * (int64_t)sizeof(TwBest) : rows * widths[i] * 4, {}});
    }
    if (!exchange.move(out, in)) return;
    for (int64_t row = 0; row < rows && step.best; row++) {
        TwBest found = own[row];
        for (int i = 1; i < exchange.count; i++) {
            const TwBest& other = exchange.best[i * rows + row];
            if (std::isnan(found.value) || other.token < 0) continue;
            if (std::isnan(other.value) || other.value > found.value || found.token < 0) found = other;
        }
        step.best[row] = found;
    }
    for (int i = 0, first = 0; i < exchange.count && !step.best; first += widths[i++])
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(worker.at(each.out, row) + first, parts[i].data() + row * widths[i], widths[i] * 4);
}

}  // namespace tw
