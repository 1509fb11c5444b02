// WakeBell: an EventCount on which its waiter may also sleep together with a descriptor.
//
// Use       as EventCount; wait_or_readable() only after open().
// Threads   notify(), prepare(), wait(): any. open(), wait_or_readable(): one at a time.
// Progress  notify() is wait-free, with a system call only if somebody sleeps.
// Bound     a wait ends after timeout_ns at the latest.
// Edges     K1  as E1 and E2 of event_count.hpp, seq_cst: notify() raises the epoch, then reads
//               is_polled_; wait_or_readable() raises is_polled_, then compares the epoch. Either
//               the notifier sees the waiter and writes the descriptor, or the waiter sees the
//               new epoch and does not sleep.
// Checked by tests/cpp/stress/event_count_stress.cc (TSan).
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "base/event_count.hpp"
#include "comm/fork_guard.hpp"

namespace rrfp {

class WakeBell {
 public:
  void open() {
    fd_ = Descriptor::open([] { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });
    if (!fd_) throw std::system_error(errno, std::generic_category(), "rrfp: eventfd");
  }

  std::uint32_t prepare() const { return events_.prepare(); }

  void notify() {
    events_.notify();                                           // K1
    if (!is_polled_.load(std::memory_order_seq_cst)) return;    // K1
    const std::uint64_t one = 1;
    // It cannot fill up, and a readable descriptor is all that is asked for.
    [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof one);
  }

  void wait(std::uint32_t ticket, std::int64_t timeout_ns) { events_.wait(ticket, timeout_ns); }

  // Also returns when `fd` is readable.
  void wait_or_readable(std::uint32_t ticket, std::int64_t timeout_ns, int fd) {
    pollfd waiting[] = {{fd_.get(), POLLIN, 0}, {fd, POLLIN, 0}};
    is_polled_.store(true, std::memory_order_seq_cst);          // K1
    if (events_.prepare() == ticket && timeout_ns > 0) {        // K1
      const timespec timeout{timeout_ns / 1000000000, timeout_ns % 1000000000};
      (void)::ppoll(waiting, 2, &timeout, nullptr);  // EINTR: spurious, as allowed
    }
    is_polled_.store(false, std::memory_order_seq_cst);         // K1
    if (waiting[0].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = ::read(fd_.get(), &count, sizeof count);
    }
  }

 private:
  EventCount events_;
  std::atomic<bool> is_polled_{false};
  Descriptor fd_;
};

}  // namespace rrfp
