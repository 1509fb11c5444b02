// WorkTurn: ranks that are threads of one process run their tasks in turn, where tasks are short.
//
// Two threads that both run operations of torch hand Python's lock (the GIL) back and forth at
// every one of them, which costs more than a short task. With a turn a thread runs all that it has
// ready, and the others wait here rather than for that lock. It is never needed, only faster: who
// has waited for kPatienceNs goes on without, and so does everybody for the rest of the step.
//
// Threads   start_step(): between steps. take(), give(): the ranks' workers, without the GIL.
// Bound     take() returns after kPatienceNs, or when the thread in its turn gives it up. One that
//           waits looks without sleeping, so that the turn passes in a microsecond and not in a
//           wake-up; the others sleep.
// Edges     None: all state is under mutex_. looks_free_ and is_on_ are read without it too, and
//           order nothing: who reads an old value looks once more or once less.
// Checked by tests/cpp/stress/work_turn_stress.cc (TSan).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace rrfp {

class WorkTurn {
 public:
  static constexpr std::int64_t kPatienceNs = 10000000;

  // Whether turns are taken in the coming step. Nobody has the turn then.
  void start_step(bool is_on);
  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }  // orders nothing

  // Whether the caller has the turn now; false once turns are off for the rest of the step.
  bool take();
  void give();  // by who has it

 private:
  void look_until(std::int64_t end_ns) const;

  std::mutex mutex_;
  std::condition_variable given_;
  bool is_taken_ = false;
  bool has_looker_ = false;  // a waiting thread that does not sleep
  std::atomic<bool> looks_free_{true};
  std::atomic<bool> is_on_{false};
};

}  // namespace rrfp
