// Joins links as a switch does to which a wire leads from each: a frame is sent at the wire's rate,
// comes out so much later, and waits for those before it on both of its wires. `tc` lets whole bursts
// through at once, which is all that a token sends, and most kernels know no delays (netem).
//
//   relay GIGABITS MICROSECONDS LINK...
//
// A frame goes to the link whose number is the last byte of its destination, or, where that is a
// group, to all other links. Prints "ready" once it hears every link. Needs root.

#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

constexpr size_t kHeader = 10;  // struct virtio_net_hdr, whose own file C++ does not read
constexpr size_t kMost = kHeader + ETH_HLEN + 65536;  // segments that the kernel has not cut yet
constexpr size_t kFull = 1514, kHeads = 66;  // a whole segment; what of it are heads, with TCP's times
constexpr size_t kAround = 24;  // preamble, check sum and gap
constexpr int kRoom = 16 << 20;
constexpr auto kEarly = std::chrono::microseconds(40);  // a sleep ends so much too late at times

struct Link {
    int socket;
    Clock::time_point out, in;  // until when its wire is busy, to the switch and from there
};

struct Frame {
    size_t to;
    std::vector<unsigned char> bytes;  // behind what is still to be done for it: sums, cutting
};

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "relay: %s: %s\n", what, std::strerror(errno));
    std::exit(2);
}

int open_link(const char* name) {
    const int found = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
    require(found >= 0, "socket");
    const auto set = [found](int level, int option, int value) {
        require(!setsockopt(found, level, option, &value, sizeof value), "setsockopt");
    };
    set(SOL_PACKET, PACKET_VNET_HDR, 1);
    set(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1);
    set(SOL_SOCKET, SO_RCVBUFFORCE, kRoom);
    set(SOL_SOCKET, SO_SNDBUFFORCE, kRoom);
    sockaddr_ll place{};
    place.sll_family = AF_PACKET;
    place.sll_protocol = htons(ETH_P_ALL);
    place.sll_ifindex = static_cast<int>(if_nametoindex(name));
    require(place.sll_ifindex != 0, name);
    require(!bind(found, reinterpret_cast<sockaddr*>(&place), sizeof place), name);
    return found;
}

class Switch {
public:
    Switch(double gigabits, Nanoseconds delay, std::vector<Link> links)
        : gigabits_(gigabits), delay_(delay), links_(std::move(links)) {}

    [[noreturn]] void run() {
        std::vector<pollfd> heard;
        for (const Link& link : links_) heard.push_back({link.socket, POLLIN, 0});
        for (;;) {
            while (!waiting_.empty() && waiting_.begin()->first <= Clock::now()) {
                const Frame& frame = waiting_.begin()->second;
                // One that a full queue does not take is lost: TCP sends it again.
                (void)!send(links_[frame.to].socket, frame.bytes.data(), frame.bytes.size(), 0);
                waiting_.erase(waiting_.begin());
            }
            timespec left{};
            if (!waiting_.empty()) {
                const Nanoseconds rest = waiting_.begin()->first - Clock::now() - kEarly;
                left.tv_nsec = std::clamp<long>(rest.count(), 0, 999'999'999);
            }
            const timespec* until = waiting_.empty() ? nullptr : &left;
            require(ppoll(heard.data(), heard.size(), until, nullptr) >= 0, "ppoll");
            for (size_t from = 0; from < links_.size(); ++from) {
                while (take(from)) {}
            }
        }
    }

private:
    Nanoseconds on_wire(size_t size) const {
        const size_t cuts = size <= kFull ? 0 : (size - kHeads - 1) / (kFull - kHeads);
        const size_t bytes = size + cuts * kHeads + (cuts + 1) * kAround;
        return Nanoseconds(static_cast<long>(8.0 * static_cast<double>(bytes) / gigabits_));
    }

    bool take(size_t from) {
        const ssize_t size = recv(links_[from].socket, buffer_, sizeof buffer_, 0);
        if (size < static_cast<ssize_t>(kHeader + ETH_HLEN)) return false;
        const size_t length = static_cast<size_t>(size) - kHeader;
        const auto first = on_wire(std::min(length, kFull)), all = on_wire(length);
        const auto begun = std::max(Clock::now(), links_[from].out);
        links_[from].out = begun + all;
        const unsigned char* destination = buffer_ + kHeader;
        const bool is_group = destination[0] & 1;
        for (size_t to = 0; to < links_.size(); ++to) {
            if (to == from || !(is_group || to == destination[ETH_ALEN - 1])) continue;
            // A segment is sent on once it is there whole, while the next one comes.
            links_[to].in = std::max(begun + first, links_[to].in) + all;
            waiting_.emplace(links_[to].in + delay_, Frame{to, {buffer_, buffer_ + size}});
        }
        return true;
    }

    const double gigabits_;
    const Nanoseconds delay_;
    std::vector<Link> links_;
    std::multimap<Clock::time_point, Frame> waiting_;  // by when each has arrived
    unsigned char buffer_[kMost];
};

}  // namespace

int main(int count, char** words) {
    if (count < 4) return 2;
    std::vector<Link> links;
    for (int each = 3; each < count; ++each) links.push_back({open_link(words[each]), {}, {}});
    // Before what computes on the nodes, as a kernel's own links are; it also ends timers' slack.
    const sched_param first{1};
    require(!sched_setscheduler(0, SCHED_FIFO, &first), "sched_setscheduler");
    std::puts("ready");
    std::fflush(stdout);
    const auto delay = std::chrono::microseconds(std::atoi(words[2]));
    Switch(std::atof(words[1]), delay, std::move(links)).run();
}
