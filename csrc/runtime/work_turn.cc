#include "runtime/work_turn.hpp"

#include <chrono>

#include "base/clock.hpp"
#include "base/relax_core.hpp"

namespace rrfp {

void WorkTurn::start_step(bool is_on) {
  std::lock_guard lock(mutex_);
  is_taken_ = false;  // a step that ended early may have kept it
  // Both order nothing.
  looks_free_.store(true, std::memory_order_relaxed);
  is_on_.store(is_on, std::memory_order_relaxed);
}

bool WorkTurn::take() {
  std::unique_lock lock(mutex_);
  const std::int64_t end_ns = steady_now_ns() + kPatienceNs;
  while (is_taken_ && is_on()) {
    const std::int64_t left_ns = end_ns - steady_now_ns();
    if (left_ns <= 0) {
      is_on_.store(false, std::memory_order_relaxed);  // orders nothing
    } else if (has_looker_) {
      given_.wait_for(lock, std::chrono::nanoseconds(left_ns));
    } else {
      has_looker_ = true;
      lock.unlock();
      look_until(end_ns);
      lock.lock();
      has_looker_ = false;
    }
  }
  if (!is_on()) return false;
  is_taken_ = true;
  looks_free_.store(false, std::memory_order_relaxed);  // orders nothing
  return true;
}

void WorkTurn::give() {
  {
    std::lock_guard lock(mutex_);
    is_taken_ = false;
    looks_free_.store(true, std::memory_order_relaxed);  // orders nothing
  }
  given_.notify_one();  // who wakes is the next to look while another has the turn
}

void WorkTurn::look_until(std::int64_t end_ns) const {
  const auto is_free = [&] { return looks_free_.load(std::memory_order_relaxed); };  // a hint
  while (!is_free() && steady_now_ns() < end_ns) relax_core();
}

}  // namespace rrfp
