// Passes frames on between links, each so long after it came, as wires of that length do: for
// kernels whose tc knows rates and no delays (tbf and no netem). What frames say is not read.
//
//   relay MICROSECONDS LINK...
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
#include <deque>
#include <optional>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kHeader = 10;  // struct virtio_net_hdr, whose own file C++ does not read
constexpr size_t kMost = kHeader + ETH_HLEN + 65536;  // segments that the kernel has not cut yet
constexpr int kRoom = 16 << 20;
constexpr auto kEarly = std::chrono::microseconds(40);  // a sleep ends so much too late at times

struct Frame {
    Clock::time_point due;
    size_t from;
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

void pass_on(const Frame& frame, const std::vector<pollfd>& links) {
    const unsigned char* destination = frame.bytes.data() + kHeader;
    const bool is_group = destination[0] & 1;
    for (size_t link = 0; link < links.size(); ++link) {
        if (link == frame.from || !(is_group || link == destination[ETH_ALEN - 1])) continue;
        // A full queue loses the frame, as one of a switch does: TCP sends it again.
        (void)!send(links[link].fd, frame.bytes.data(), frame.bytes.size(), 0);
    }
}

std::optional<Frame> take(const std::vector<pollfd>& links, size_t from, Clock::duration delay) {
    static unsigned char buffer[kMost];
    const ssize_t size = recv(links[from].fd, buffer, sizeof buffer, 0);
    if (size < static_cast<ssize_t>(kHeader + ETH_HLEN)) return std::nullopt;
    return Frame{Clock::now() + delay, from, {buffer, buffer + size}};
}

[[noreturn]] void relay(std::vector<pollfd>& links, Clock::duration delay) {
    std::deque<Frame> waiting;  // one delay for all, so the first that came is the first due
    for (;;) {
        while (!waiting.empty() && waiting.front().due <= Clock::now()) {
            pass_on(waiting.front(), links);
            waiting.pop_front();
        }
        timespec left{};
        if (!waiting.empty()) {
            const auto rest = waiting.front().due - Clock::now() - kEarly;
            left.tv_nsec = std::max<long>(std::chrono::nanoseconds(rest).count(), 0);
        }
        require(ppoll(links.data(), links.size(), waiting.empty() ? nullptr : &left, nullptr) >= 0,
                "ppoll");
        for (size_t from = 0; from < links.size(); ++from) {
            while (auto frame = take(links, from, delay)) waiting.push_back(std::move(*frame));
        }
    }
}

}  // namespace

int main(int count, char** words) {
    if (count < 3) return 2;
    std::vector<pollfd> links;
    for (int each = 2; each < count; ++each) {
        links.push_back({open_link(words[each]), POLLIN, 0});
    }
    // Before what computes on the nodes, as a kernel's own links are; it also ends timers' slack.
    const sched_param first{1};
    require(!sched_setscheduler(0, SCHED_FIFO, &first), "sched_setscheduler");
    std::puts("ready");
    std::fflush(stdout);
    relay(links, std::chrono::microseconds(std::atoi(words[1])));
}
