// Collectives between ranks inside a step: sums of partial values, and the best logits.
//
// Each pair of ranks has a stream socket. All ranks add the same numbers in the same order:
// pairwise in rank order. Each addend is first rounded to the link format, even on its own rank.
#pragma once

#include <chrono>
#include <vector>

#include "interface.h"

namespace tw {

class Memory;
struct Worker;

// Values are sent in blocks of 32. Zeros pad a row's last block.
constexpr int64_t kWireBlock = 32;
int64_t wire_block_bytes(int32_t wire);
void to_wire(const float* x, int64_t count, int32_t wire, uint8_t* out);  // up to a block
void from_wire(const uint8_t* x, int32_t wire, float* out);               // a block

class Exchange {
  public:
    struct Piece {
        int peer;
        uint8_t* data;
        int64_t size;
        uint32_t header[2];
        int64_t done = 0;  // header and data
    };

    Exchange(const TwPeers& peers, int64_t max_blocks);
    ~Exchange();

    // Transfer all messages. Return false after a rank's failure or timeout, also for all later
    // calls.
    bool move(std::vector<Piece>& out, std::vector<Piece>& in);

    // Sum [rows, width] over all ranks, in place, with this thread only.
    bool add(float* values, int64_t rows, int64_t width, int32_t wire);

    template <class Read, class Write, class Share, class Meet>
    void reduce(int64_t rows, int64_t width, int32_t wire, bool is_first, Read read, Write write, Share share, Meet meet);

    int rank, count;
    int64_t number = 0, num_bytes = 0, nanoseconds = 0;
    int failed = -1;
    int64_t two_hops_from;  // bytes per rank; equal on all ranks
    std::vector<TwBest> best;

  private:
    using Clock = std::chrono::steady_clock;
    bool is_two_hops(int64_t num_blocks, int32_t wire) const;
    void sum_block(int64_t block, int32_t wire, float* out) const;  // over all ranks
    int64_t first_of(int chunk, int64_t num_blocks) const { return num_blocks * chunk / count; }
    bool swap_all(int64_t num_blocks, int32_t wire);      // one hop: all values to all ranks
    bool swap_chunks(int64_t num_blocks, int32_t wire);   // two hops: chunks to their adding ranks
    bool spread_sums(int64_t num_blocks, int32_t wire);   // sums to all ranks
    bool fail(int peer);
    bool send_some(Piece& piece, bool& moved);
    bool receive_some(Piece& piece, bool& moved);
    bool wait(const std::vector<Piece>& out, const std::vector<Piece>& in, Clock::time_point deadline);

    std::vector<int32_t> sockets_;
    std::vector<uint8_t*> parts_;   // per rank, including this rank: values in link format
    uint8_t* sums_ = nullptr;       // in link format
    std::vector<Memory> memories_;
    std::chrono::milliseconds limit_;
    int looks_, most_looks_;
};

void run_all_reduce(Worker& worker, const TwInstruction& each);
void run_gather_logits(Worker& worker, const TwInstruction& each);

}  // namespace tw
