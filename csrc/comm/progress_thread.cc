#include "comm/progress_thread.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/check.hpp"
#include "base/clock.hpp"
#include "base/relax_core.hpp"
#include "base/trace.hpp"
#include "comm/doorbell.hpp"
#include "comm/fork_guard.hpp"

namespace rrfp {

namespace {
constexpr std::int64_t kTickNs = ProgressThread::kTickMs * 1000000;

// The thread must never run a signal handler: the interpreter's belong to the main thread.
std::thread start_without_signals(void (*body)(void*), void* argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(body, argument);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

void watch_fd(int epoll_fd, int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "rrfp: epoll_ctl");
  }
}
}  // namespace

// The member list has two copies: `members` under the mutex, and the thread's own, taken anew
// between two passes when version_wanted moves. remove() waits for that.
struct ProgressThread::State {
  std::mutex lifecycle_mutex;  // one add() or remove() at a time; never taken by the thread
  std::mutex mutex;            // members, version_taken
  std::condition_variable taken;
  std::vector<Progressing*> members;
  std::uint64_t version_taken = 0;
  // M1: raised (release) under the mutex after `members` changed; the thread reads it
  // (acquire) at each pass and takes the list under the mutex.
  std::atomic<std::uint64_t> version_wanted{0};
  std::atomic<std::int64_t> spin_ns{0};
  Descriptor epoll;
  std::unique_ptr<Doorbell> doorbell;  // wakes the thread for a changed list
  std::thread thread;

  void start(Progressing* first);
  void stop();
  void change_members(const std::function<void()>& change);
  void run();
  bool take_members(std::vector<Progressing*>* own, std::uint64_t* version);
  void sleep(std::int64_t until_ns);
};

void ProgressThread::State::start(Progressing* first) {
  epoll = Descriptor::open([] { return epoll_create1(EPOLL_CLOEXEC); });
  if (!epoll) throw std::system_error(errno, std::generic_category(), "rrfp: epoll_create1");
  doorbell = std::make_unique<Doorbell>();
  watch_fd(epoll.get(), doorbell->fd(), EPOLLIN | EPOLLET);
  if (first->wait_fd() >= 0) watch_fd(epoll.get(), first->wait_fd(), EPOLLIN);
  members.push_back(first);
  // The new thread has taken version 0: it finds a later one, and its member.
  version_wanted.fetch_add(1, std::memory_order_relaxed);  // starting a thread orders it
  try {
    thread = start_without_signals([](void* self) { static_cast<State*>(self)->run(); }, this);
  } catch (...) {
    members.clear();
    throw;
  }
}

void ProgressThread::State::stop() {
  thread.join();
  epoll.close();
  doorbell.reset();
}

// Returns when the thread works with the changed list.
void ProgressThread::State::change_members(const std::function<void()>& change) {
  std::unique_lock lock(mutex);
  change();
  const std::uint64_t version =
      version_wanted.fetch_add(1, std::memory_order_release) + 1;  // M1
  doorbell->ring();
  // Bounded by one pass: members neither block nor wait.
  taken.wait(lock, [&] { return version_taken >= version; });
}

// False: the list became empty, the thread ends.
bool ProgressThread::State::take_members(std::vector<Progressing*>* own,
                                         std::uint64_t* version) {
  if (version_wanted.load(std::memory_order_acquire) == *version) return true;  // M1
  std::lock_guard lock(mutex);
  *own = members;
  *version = version_wanted.load(std::memory_order_relaxed);  // under the mutex
  version_taken = *version;
  taken.notify_all();
  return !own->empty();
}

void ProgressThread::State::sleep(std::int64_t until_ns) {
  const std::int64_t left_ns = until_ns - steady_now_ns();
  if (left_ns <= 0 || !doorbell->try_sleep()) return;
  epoll_event events[16];
  // Which ones are readable does not matter: every pass asks all members. An error can only be
  // EINTR, and then the next pass comes early.
  (void)epoll_wait(epoll.get(), events, 16, static_cast<int>(left_ns / 1000000 + 1));
}

void ProgressThread::State::run() {
  trace_thread_name("rrfp progress");
  pthread_setname_np(pthread_self(), "rrfp-progress");
  std::vector<Progressing*> own;
  std::uint64_t version = 0;
  std::int64_t next_tick_ns = 0;
  std::int64_t worked_ns = 0;
  for (;;) {
    doorbell->answer();
    if (!take_members(&own, &version)) return;
    std::int64_t now_ns = steady_now_ns();
    std::size_t handled = 0;
    for (Progressing* member : own) handled += member->progress(now_ns);
    if (handled > 0) worked_ns = now_ns;
    if (now_ns >= next_tick_ns) {
      for (Progressing* member : own) member->tick(now_ns);
      next_tick_ns = now_ns + kTickNs;
      continue;  // a tick may have posted something
    }
    if (handled > 0) continue;
    if (now_ns - worked_ns < spin_ns.load(std::memory_order_relaxed)) {  // a setting
      relax_core();
    } else {
      sleep(next_tick_ns);
    }
  }
}

ProgressThread& ProgressThread::instance() {
  // Never destroyed: a process may exit with members left, and the thread must then find
  // everything it uses until the very end.
  static ProgressThread* const thread = new ProgressThread;
  return *thread;
}

ProgressThread::ProgressThread() : state_(std::make_unique<State>()) {}

ProgressThread::~ProgressThread() = default;

void ProgressThread::add(Progressing* member) {
  RRFP_CHECK(!process_was_forked(),
             "this process was forked while rrfp was in use; rrfp works in the parent only. "
             "Start processes with spawn, or fork before the first pipeline.");
  State& state = *state_;
  std::lock_guard lifecycle(state.lifecycle_mutex);
  if (state.members.empty()) return state.start(member);
  if (member->wait_fd() >= 0) watch_fd(state.epoll.get(), member->wait_fd(), EPOLLIN);
  state.change_members([&] { state.members.push_back(member); });
}

void ProgressThread::remove(Progressing* member) {
  if (process_was_forked()) return;  // the thread stayed with the parent
  State& state = *state_;
  std::lock_guard lifecycle(state.lifecycle_mutex);
  RRFP_INVARIANT(state.thread.get_id() != std::this_thread::get_id(),
                 "a member removed itself from inside its own callback");
  const auto found = std::find(state.members.begin(), state.members.end(), member);
  if (found == state.members.end()) return;
  if (member->wait_fd() >= 0) {
    (void)epoll_ctl(state.epoll.get(), EPOLL_CTL_DEL, member->wait_fd(), nullptr);
  }
  state.change_members([&] { state.members.erase(found); });
  if (state.members.empty()) state.stop();
}

void ProgressThread::set_spin_us(std::int64_t spin_us) {
  state_->spin_ns.store(spin_us * 1000, std::memory_order_relaxed);  // a setting
}

// Fails only for a member that is being removed, which needs no watching any more.
void ProgressThread::watch(Progressing* member, bool on) {
  epoll_event event{};
  event.events = on ? EPOLLIN : 0u;
  (void)epoll_ctl(state_->epoll.get(), EPOLL_CTL_MOD, member->wait_fd(), &event);
}

void ProgressThread::look() { state_->doorbell->ring(); }

}  // namespace rrfp
