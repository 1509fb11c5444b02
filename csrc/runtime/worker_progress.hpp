// WorkerProgress: how a rank's worker waits, and who moves its messages meanwhile.
//
// With worker_moves_messages a worker that waits takes the transport over from the progress
// thread: it calls progress() itself, spins for a bounded time, then sleeps on the transport's
// own descriptor. What arrives wakes the very thread that wants it. When it gets a task that
// usually takes less than kShortTaskNs it only lends the transport, and moves what has piled up
// when it comes back; before longer ones, and whenever its wait is over, it gives it back.
//
// The bell of an agreement group lies in shared memory, and no descriptor goes with it: a member
// moves its messages only while it spins, where a core is spared for that, and sleeps without.
//
// Threads   pass(): the progress thread. A Hold: one waiting call of the worker (or of whoever
//           closes the pipeline), on its stack. Two Holds at a time are safe: one has the turn.
// Progress  pass() never waits for the worker, nor a Hold for the progress thread longer than
//           kRetryNs at a time.
// Bound     A Hold spins for spin_us at most, from its first wait on. What is lent is looked
//           at by the progress thread after its tick (50 ms) at the latest, so a task that turns
//           out long, or a stage that never returns, holds nobody up for longer.
// Edges     H1 (progress_turn.hpp) hands the transport over. Which thread its descriptor wakes is
//           changed only by who has the turn; the descriptor is level-triggered, so nothing that
//           came before the change is missed. A doorbell of the transport is asleep only after a
//           progress() that returned 0: who leaves without having seen that tells the progress
//           thread to look.
// Checked by tests/cpp/unit/worker_progress_test.cc, tests/cpp/stress/rank_runtime_stress.cc
// (TSan).
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/progress_thread.hpp"
#include "comm/progress_turn.hpp"
#include "comm/transport.hpp"
#include "comm/wake_bell.hpp"
#include "runtime/runtime_options.hpp"

namespace rrfp {

class WorkerProgress {
 public:
  static constexpr std::int64_t kShortTaskNs = 200000;
  static constexpr std::int64_t kRetryNs = 50000;

  WorkerProgress(Transport& transport, const RuntimeOptions& options)
      : transport_(transport), options_(options) {}

  // Once, by the member that has joined the progress thread: from now on its worker may take the
  // transport over. Does nothing unless the options ask for it.
  void share(Progressing* member);
  bool is_shared() const { return member_ != nullptr; }

  std::size_t pass(std::int64_t now_ns);

  class Hold {
   public:
    // Takes back what was lent, and moves what has piled up.
    explicit Hold(WorkerProgress& progress);
    ~Hold() { give_back(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    // Returns at a notify() of the bell after prepare(), at the time-out, or spuriously.
    void wait(WakeBell& bell, std::uint32_t ticket, std::int64_t timeout_ns);
    void wait(SharedEventCount& bell, std::uint32_t ticket, std::int64_t timeout_ns);
    // The worker will be back very soon; does nothing when it has nothing to lend.
    void lend();
    void give_back();

   private:
    bool take();
    bool may_spin(std::int64_t now_ns);
    template <class Bell>
    void spin_and_sleep(Bell& bell, std::uint32_t ticket, std::int64_t timeout_ns);
    // Moves messages until the bell rings or end_ns comes (true), or it may spin no longer.
    template <class Bell>
    bool move_and_spin(Bell& bell, std::uint32_t ticket, std::int64_t end_ns);
    void move_and_sleep(WakeBell& bell, std::uint32_t ticket, std::int64_t timeout_ns);

    WorkerProgress& progress_;
    std::int64_t spin_until_ns_ = 0;  // 0: has not waited yet
    bool has_turn_ = false;
  };

 private:
  std::int64_t now() const { return options_.now_ns(); }

  Transport& transport_;
  const RuntimeOptions& options_;
  Progressing* member_ = nullptr;  // null: the progress thread alone moves messages
  ProgressTurn<> turn_;
};

}  // namespace rrfp
