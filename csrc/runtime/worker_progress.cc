#include "runtime/worker_progress.hpp"

#include <algorithm>
#include <thread>

#include "base/relax_core.hpp"

namespace rrfp {

namespace {
constexpr int kLeavingPasses = 2;  // that may find something before the progress thread is told
// A transport has deadlines of its own, which progress() looks at.
constexpr std::int64_t kLongestSleepNs = ProgressThread::kTickMs * 1000000;
}  // namespace

void WorkerProgress::share(Progressing* member) {
  if (options_.worker_moves_messages && transport_.wait_fd() >= 0) member_ = member;
}

std::size_t WorkerProgress::pass(std::int64_t now_ns) {
  const TurnHolder found = turn_.enter();
  if (found == TurnHolder::kThread) return 0;
  const std::size_t handled = transport_.progress(now_ns);
  if (found == TurnHolder::kLent) ProgressThread::instance().watch(member_, true);
  turn_.leave();
  return handled;
}

WorkerProgress::Hold::Hold(WorkerProgress& progress) : progress_(progress) {
  if (!progress_.is_shared() || !progress_.turn_.take_lent()) return;
  has_turn_ = true;
  progress_.transport_.progress(progress_.now());
}

bool WorkerProgress::Hold::take() {
  if (has_turn_) return true;
  if (!progress_.turn_.take()) return false;
  ProgressThread::instance().watch(progress_.member_, false);
  has_turn_ = true;
  return true;
}

void WorkerProgress::Hold::wait(WakeBell& bell, std::uint32_t ticket, std::int64_t timeout_ns) {
  if (!progress_.is_shared()) return spin_and_sleep(bell, ticket, timeout_ns);
  if (take()) return move_and_sleep(bell, ticket, timeout_ns);
  bell.wait(ticket, std::min(timeout_ns, kRetryNs));  // the thread is inside, for one pass
}

void WorkerProgress::Hold::wait(SharedEventCount& bell, std::uint32_t ticket,
                                std::int64_t timeout_ns) {
  const bool has_core = progress_.is_shared() && !progress_.options_.spin_yields;
  if (!has_core) return spin_and_sleep(bell, ticket, timeout_ns);
  if (!take()) return bell.wait(ticket, std::min(timeout_ns, kRetryNs));
  const std::int64_t end_ns = progress_.now() + timeout_ns;
  if (move_and_spin(bell, ticket, end_ns)) return;
  give_back();
  bell.wait(ticket, end_ns - progress_.now());
}

void WorkerProgress::Hold::lend() {
  if (!has_turn_) return;
  has_turn_ = false;
  progress_.turn_.lend();
}

void WorkerProgress::Hold::give_back() {
  if (!has_turn_) return;
  has_turn_ = false;
  bool is_asleep = false;
  for (int i = 0; i < kLeavingPasses && !is_asleep; ++i) {
    is_asleep = progress_.transport_.progress(progress_.now()) == 0;
  }
  ProgressThread& thread = ProgressThread::instance();
  thread.watch(progress_.member_, true);
  progress_.turn_.give_back();
  if (!is_asleep) thread.look();
}

// Whether to look again rather than sleep; lets another thread run in between.
bool WorkerProgress::Hold::may_spin(std::int64_t now_ns) {
  const RuntimeOptions& options = progress_.options_;
  if (spin_until_ns_ == 0) spin_until_ns_ = now_ns + options.spin_us * 1000;
  if (now_ns >= spin_until_ns_) return false;
  if (options.spin_yields) {
    std::this_thread::yield();
  } else {
    relax_core();
  }
  return true;
}

template <class Bell>
void WorkerProgress::Hold::spin_and_sleep(Bell& bell, std::uint32_t ticket,
                                          std::int64_t timeout_ns) {
  std::int64_t now_ns = progress_.now();
  const std::int64_t end_ns = now_ns + timeout_ns;
  while (now_ns < end_ns && may_spin(now_ns)) {
    if (bell.prepare() != ticket) return;
    now_ns = progress_.now();
  }
  bell.wait(ticket, end_ns - now_ns);
}

template <class Bell>
bool WorkerProgress::Hold::move_and_spin(Bell& bell, std::uint32_t ticket, std::int64_t end_ns) {
  while (true) {
    const std::int64_t now_ns = progress_.now();
    const std::size_t handled = progress_.transport_.progress(now_ns);
    if (bell.prepare() != ticket || now_ns >= end_ns) return true;
    if (handled == 0 && !may_spin(now_ns)) return false;
  }
}

void WorkerProgress::Hold::move_and_sleep(WakeBell& bell, std::uint32_t ticket,
                                          std::int64_t timeout_ns) {
  const std::int64_t end_ns = progress_.now() + timeout_ns;
  while (!move_and_spin(bell, ticket, end_ns)) {
    bell.wait_or_readable(ticket, std::min(end_ns - progress_.now(), kLongestSleepNs),
                          progress_.transport_.wait_fd());
  }
}

}  // namespace rrfp
