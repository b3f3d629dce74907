// What ranks exchange inside a step: sums of their partial values, and the best of their logits.
//
// Every rank has a stream socket to every other one. Sums are made of the same numbers in the same
// order on all ranks: pairwise, in their order, of what was rounded to the wire's format, a rank's
// own included.
#pragma once

#include <chrono>
#include <vector>

#include "interface.h"

namespace tw {

class Memory;
struct Worker;

// Values travel in blocks of 32; a row's last block is padded with zeros.
constexpr int64_t kWireBlock = 32;
int64_t wire_block_bytes(int32_t wire);
void to_wire(const float* x, int64_t count, int32_t wire, uint8_t* out);  // up to one block
void from_wire(const uint8_t* x, int32_t wire, float* out);               // one block

class Exchange {
  public:
    struct Piece {
        int peer;
        uint8_t* data;
        int64_t size;
        uint32_t header[2];
        int64_t done = 0;  // of header and data
    };

    Exchange(const TwPeers& peers, int64_t max_blocks);
    ~Exchange();

    // All pieces at once; false where a rank is gone or late, then and ever after.
    bool move(std::vector<Piece>& out, std::vector<Piece>& in);

    // The sum over all ranks of [rows, width], in place, by this thread alone.
    bool add(float* values, int64_t rows, int64_t width, int32_t wire);

    template <class Read, class Write, class Share, class Meet>
    void reduce(int64_t rows, int64_t width, int32_t wire, bool is_first, Read read, Write write, Share share, Meet meet);

    int rank, count;
    int64_t number = 0, num_bytes = 0, nanoseconds = 0;
    int failed = -1;
    int64_t two_hops_from;  // bytes of a rank's values; alike on all ranks
    std::vector<TwBest> best;

  private:
    using Clock = std::chrono::steady_clock;
    bool is_two_hops(int64_t num_blocks, int32_t wire) const;
    void sum_block(int64_t block, int32_t wire, float* out) const;  // of all ranks' values
    int64_t first_of(int chunk, int64_t num_blocks) const { return num_blocks * chunk / count; }
    bool swap_all(int64_t num_blocks, int32_t wire);      // one hop: everything to all
    bool swap_chunks(int64_t num_blocks, int32_t wire);   // two hops: a chunk to the rank that adds it
    bool spread_sums(int64_t num_blocks, int32_t wire);   // and its sums to all
    bool fail(int peer);
    bool send_some(Piece& piece, bool& moved);
    bool receive_some(Piece& piece, bool& moved);
    bool wait(const std::vector<Piece>& out, const std::vector<Piece>& in, Clock::time_point deadline);

    std::vector<int32_t> sockets_;
    std::vector<uint8_t*> parts_;   // of ranks, this one's included: values as they travel
    uint8_t* sums_ = nullptr;       // as they travel
    std::vector<Memory> memories_;
    std::chrono::milliseconds limit_;
    int looks_, most_looks_;
};

void run_all_reduce(Worker& worker, const TwInstruction& each);
void run_gather_logits(Worker& worker, const TwInstruction& each);

}  // namespace tw
