#include "comm/fork_guard.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <vector>

namespace rrfp {

namespace {

// The fork itself is ordered by the mutex; the flag is read without it.
std::atomic<bool> was_forked{false};

struct Registry {
  std::mutex mutex;
  std::vector<int> open;
};

// Never destroyed: the progress thread may close descriptors while the process exits.
Registry& registry();

void before_fork() { registry().mutex.lock(); }

void after_fork_in_parent() { registry().mutex.unlock(); }

void after_fork_in_child() {
  Registry& all = registry();
  for (const int fd : all.open) ::close(fd);
  if (!all.open.empty()) was_forked.store(true, std::memory_order_relaxed);  // one thread here
  all.open.clear();
  all.mutex.unlock();
}

Registry& registry() {
  static Registry* const all = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new Registry;
  }();
  return *all;
}

}  // namespace

bool process_was_forked() {
  return was_forked.load(std::memory_order_relaxed);  // set before the child's first thread
}

Descriptor Descriptor::open(const std::function<int()>& open_it) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  all.open.reserve(all.open.size() + 1);  // may throw, while nothing is open yet
  Descriptor result;
  result.fd_ = open_it();
  if (result.fd_ >= 0) all.open.push_back(result.fd_);
  return result;
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    std::swap(fd_, other.fd_);
  }
  return *this;
}

void Descriptor::close() {
  if (fd_ < 0) return;
  const int saved_errno = errno;
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  const auto found = std::find(all.open.begin(), all.open.end(), fd_);
  if (found != all.open.end()) {
    *found = all.open.back();
    all.open.pop_back();
    ::close(fd_);
  }
  fd_ = -1;
  errno = saved_errno;
}

}  // namespace rrfp
