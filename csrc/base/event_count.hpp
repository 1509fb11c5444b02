// EventCount: lets one or more threads sleep until somebody says that something changed,
// without a lock and without a lost wake-up.
//
// Use: the waiter calls prepare(), looks once more at what it waits for, then wait(ticket,
// timeout). The notifier changes the state, then calls notify().
//
// Threads: any number on either side. Progress: notify is wait-free (one RMW, one load, and a
// futex wake only if somebody sleeps). Bound: wait returns after timeout_ns at the latest.
//
// Edges: all four operations are seq_cst, because this is the store-buffer pattern:
//   E1 notify: epoch_ += 1, then reads waiters_.
//   E2 wait:   waiters_ += 1, then the kernel compares epoch_ with the ticket.
// Either the notifier sees the waiter, or the kernel sees the new epoch and refuses to sleep.
// What was written before notify() is visible after a wait() or prepare() that sees the new
// epoch.
// SharedEventCount is the same in memory that several processes share; one that dies while it
// sleeps leaves waiters_ too high, which costs every later notify() a system call and no more.
// Checked by tests/cpp/stress/event_count_stress.cc (TSan).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace rrfp {

enum class EventScope : int { kProcess = FUTEX_PRIVATE_FLAG, kMachine = 0 };

template <EventScope kScope>
class BasicEventCount {
 public:
  std::uint32_t prepare() const { return epoch_.load(std::memory_order_seq_cst); }  // E2

  void notify() {
    epoch_.fetch_add(1, std::memory_order_seq_cst);            // E1
    if (waiters_.load(std::memory_order_seq_cst) != 0) {       // E1
      syscall(SYS_futex, address(), FUTEX_WAKE | kFlags, INT32_MAX, nullptr, nullptr, 0);
    }
  }

  // Returns at a notify() after prepare(), at the time-out, or spuriously.
  void wait(std::uint32_t ticket, std::int64_t timeout_ns) {
    waiters_.fetch_add(1, std::memory_order_seq_cst);          // E2
    if (epoch_.load(std::memory_order_seq_cst) == ticket && timeout_ns > 0) {  // E2
      timespec timeout{timeout_ns / 1000000000, timeout_ns % 1000000000};
      syscall(SYS_futex, address(), FUTEX_WAIT | kFlags, ticket, &timeout, nullptr, 0);
    }
    waiters_.fetch_sub(1, std::memory_order_seq_cst);          // E2
    (void)epoch_.load(std::memory_order_seq_cst);              // E2: what came before notify()
  }

 private:
  static constexpr int kFlags = static_cast<int>(kScope);

  std::uint32_t* address() { return reinterpret_cast<std::uint32_t*>(&epoch_); }

  std::atomic<std::uint32_t> epoch_{0};
  std::atomic<std::uint32_t> waiters_{0};
  static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
};

using EventCount = BasicEventCount<EventScope::kProcess>;
using SharedEventCount = BasicEventCount<EventScope::kMachine>;

}  // namespace rrfp
