// Doorbell: tells the progress thread that something was posted, with a system call only when
// it may be asleep.
//
// Use       poster: change the state, then ring(). Sleeper: answer(), look at everything; when
//           nothing was there, try_sleep(), and if that is true, wait on fd().
// Threads   ring(): any. answer(), try_sleep(): one.
// Progress  wait-free. A ring is never lost.
// Edges     D1  ring() and answer() are acq_rel RMWs of one word. Either the ring comes first,
//               and answer() makes what was posted visible; or it comes later, and then it finds
//               kAsleep and writes the descriptor, or try_sleep() finds kRung and refuses.
// The descriptor is meant for edge-triggered epoll: it is never read, so it stays readable.
// Checked by tests/cpp/stress/progress_thread_stress.cc (TSan).
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "comm/fork_guard.hpp"

namespace rrfp {

class Doorbell {
 public:
  Doorbell() : fd_(Descriptor::open([] { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); })) {
    if (!fd_) throw std::system_error(errno, std::generic_category(), "rrfp: eventfd");
  }

  int fd() const { return fd_.get(); }

  void ring() {
    if (state_.exchange(State::kRung, std::memory_order_acq_rel) != State::kAsleep) return;  // D1
    const std::uint64_t one = 1;
    // Cannot fill up: 2^64 - 2 rings are out of reach.
    [[maybe_unused]] const ssize_t written = ::write(fd_.get(), &one, sizeof one);
  }

  void answer() { state_.exchange(State::kAwake, std::memory_order_acq_rel); }  // D1

  bool try_sleep() {
    State expected = State::kAwake;
    return state_.compare_exchange_strong(expected, State::kAsleep,
                                          std::memory_order_acq_rel);  // D1
  }

 private:
  enum class State : std::uint32_t { kAwake, kRung, kAsleep };

  Descriptor fd_;
  std::atomic<State> state_{State::kAwake};
};

}  // namespace rrfp
