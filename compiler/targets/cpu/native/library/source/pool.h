// A pool of threads that run a common function with barriers.
//
// A waiting thread spins briefly and then sleeps: on a busy machine it must not block the thread it
// waits for.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tw {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number with waiting for its change.
class Signal {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void raise() {
        value_.fetch_add(1, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst)) wake();
    }

    // `patience`: poll count before this thread sleeps. It grows after successful polling and
    // shrinks after vain polling, for example on busy cores.
    void wait(uint32_t old, int& patience) {
        for (int i = 0; i < patience; i++) {
            if (value() != old) {
                patience = patience < kMostLooks / 2 ? 2 * patience : kMostLooks;
                return;
            }
            pause();
        }
        patience = patience / 2 > kLeastLooks ? patience / 2 : kLeastLooks;
        while (value() == old) sleep(old);
    }

  private:
    static constexpr int kLeastLooks = 32, kMostLooks = 4096;

#if defined(__linux__)
    void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
    void sleep(uint32_t old) {
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
        num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }
#else
    void wake() { value_.notify_all(); }
    void sleep(uint32_t old) {
        num_asleep_.fetch_add(1);
        value_.wait(old);
        num_asleep_.fetch_sub(1);
    }
#endif
    std::atomic<uint32_t> value_{0};
    std::atomic<int32_t> num_asleep_{0};
};

class Pool {
  public:
    using Function = void (*)(void* context, int thread);

    explicit Pool(int num_threads) : num_threads_(num_threads), patience_(num_threads) {
        for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
    }

    ~Pool() {
        function_ = nullptr;
        begin_.raise();
        for (auto& each : threads_) each.join();
    }

    int size() const { return num_threads_; }

    // Minimum polls before a thread sleeps. While a thread waits for another rank, waking the
    // threads would take longer than the wait.
    int least_looks = 0;

    // Run a function on all threads, including this thread. Return when all are done.
    void run(Function function, void* context) {
        function_ = function;
        context_ = context;
        begin_.raise();
        function(context, 0);
        meet(0);
    }

    // Barrier for all threads inside run.
    void meet(int thread) {
        if (num_threads_ == 1) return;
        uint32_t old = met_.value();
        if (num_met_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
            num_met_.store(0, std::memory_order_relaxed);
            met_.raise();
        } else {
            met_.wait(old, patience_[thread].looks);
            if (patience_[thread].looks < least_looks) patience_[thread].looks = least_looks;
        }
    }

  private:
    struct alignas(64) Patience {
        int looks = 1024;
    };

    void work(int thread) {
        int idle = 1024;
        for (uint32_t seen = 0;; seen++) {
            begin_.wait(seen, idle);
            if (!function_) return;
            function_(context_, thread);
            meet(thread);
        }
    }

    const int num_threads_;
    Function function_ = nullptr;
    void* context_ = nullptr;
    std::vector<Patience> patience_;
    alignas(64) Signal begin_;
    alignas(64) Signal met_;
    alignas(64) std::atomic<int> num_met_{0};
    std::vector<std::thread> threads_;
};

}  // namespace tw
