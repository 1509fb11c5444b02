// ProgressGuard: ends what a progress thread that is held up cannot end itself.
//
// A host call that waits for the device (cudaFree, also inside torch's allocator when memory is
// short) keeps calls of other threads out of the driver. Behind a stream that waits for a message
// it ends when the message comes; when its sender has died meanwhile, the thread that would hear
// of it may be one of those kept out. The guard looks from a thread of its own.
//
// Threads  enter() and leave(): the progress thread. `on_held_up` is called on the guard's thread,
//          once, while the progress thread is inside or has just come out.
// Progress enter() and leave() are wait-free.
// Bound    The call comes held_up_ms to held_up_ms + kLookMs after enter().
// Edges    U1  since_ns_ is relaxed: a number that may be old by the time it is read.
// Lifetime The destructor joins the thread; on_held_up must not wait for the destroyer.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.hpp"

namespace rrfp {

class ProgressGuard {
 public:
  static constexpr std::int64_t kLookMs = 200;

  ProgressGuard(std::int64_t held_up_ms, std::function<void()> on_held_up)
      : held_up_ms_(held_up_ms), on_held_up_(std::move(on_held_up)), thread_([this] { run(); }) {}
  ~ProgressGuard() {
    {
      std::lock_guard lock(mutex_);
      is_ended_ = true;
    }
    ended_.notify_all();
    thread_.join();
  }
  ProgressGuard(const ProgressGuard&) = delete;
  ProgressGuard& operator=(const ProgressGuard&) = delete;

  void enter(std::int64_t now_ns) { since_ns_.store(now_ns, std::memory_order_relaxed); }  // U1
  void leave() { since_ns_.store(0, std::memory_order_relaxed); }  // U1

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, std::chrono::milliseconds(kLookMs), [&] { return is_ended_; })) {
      const std::int64_t since_ns = since_ns_.load(std::memory_order_relaxed);  // U1
      if (since_ns == 0 || steady_now_ns() - since_ns < held_up_ms_ * 1000000) continue;
      lock.unlock();
      on_held_up_();
      return;
    }
  }

  const std::int64_t held_up_ms_;
  const std::function<void()> on_held_up_;
  std::atomic<std::int64_t> since_ns_{0};  // 0: outside
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_ended_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace rrfp
