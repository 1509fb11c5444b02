// FineSleep: short sleeps of the calling thread end when they should.
//
// Linux ends a sleep up to 50 us late, so as to wake for several things at once (the thread's
// timer slack); a sleep of 10 us takes 65. Inside this scope it takes 20.
// Threads  the calling one alone. Cost: two system calls. Threads at real-time priority have no
//          slack, and need none of this.
#pragma once

#include <sys/prctl.h>

namespace rrfp {

class FineSleep {
 public:
  FineSleep() : slack_ns_(::prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) {
    if (slack_ns_ > kSlackNs) set(kSlackNs);
  }
  ~FineSleep() {
    if (slack_ns_ > kSlackNs) set(slack_ns_);
  }
  FineSleep(const FineSleep&) = delete;
  FineSleep& operator=(const FineSleep&) = delete;

 private:
  static constexpr long kSlackNs = 1000;

  static void set(long slack_ns) {
    ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_ns), 0, 0, 0);
  }

  const long slack_ns_;  // negative: the kernel does not say
};

}  // namespace rrfp
