// A stream of the CUDA runtime made of threads: a thread that runs what is enqueued, in order,
// each piece of work after a random delay.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "check.hpp"

namespace rrfp::test {

inline constexpr int kMaxDelayUs = 200;

class FakeStream {
 public:
  FakeStream() : random_(rrfp::test::seed()), thread_([this] { run(); }) {}
  ~FakeStream() {
    {
      std::lock_guard lock(mutex_);
      is_ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void enqueue(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return work_.empty();
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return work_.empty(); });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return is_ended_ || !work_.empty(); });
      if (work_.empty()) return;
      const std::function<void()> work = work_.front();
      const auto delay = std::chrono::microseconds(random_() % kMaxDelayUs);
      lock.unlock();
      std::this_thread::sleep_for(delay);
      work();
      lock.lock();
      work_.pop_front();
      if (work_.empty()) idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable idle_;
  std::deque<std::function<void()>> work_;  // the front is being run
  bool is_ended_ = false;
  std::mt19937 random_;
  std::thread thread_;
};

// Null: the default stream, which lives as long as the process.
inline FakeStream& stream_of(void* stream) {
  static FakeStream& default_stream = *new FakeStream;
  return stream == nullptr ? default_stream : *static_cast<FakeStream*>(stream);
}

}  // namespace rrfp::test
