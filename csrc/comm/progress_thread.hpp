// ProgressThread: the one thread of the process that calls progress(), unless a member's worker
// has taken its transport over for a while (runtime/worker_progress.hpp). It never takes the
// GIL, never throws, and allocates nothing per message.
//
// It sleeps in epoll_wait on the transports' descriptors, after a bounded spin when the host
// has cores to spare (RRFP_SPIN_US, read by the Python side and passed in). tick() of each
// member is called at least every kTickMs: heartbeats, time-outs and the stall watch hang
// on it.
//
// Threads  add() and remove() from any thread but this one; watch() and look() from any, between
//          add() and remove(). remove() returns only when the
//          thread is not inside the member and will not enter it again, so the member may then
//          be destroyed. The thread blocks all signals; its name is rrfp-progress.
// Edges    M1  the member list is taken anew (acquire) when its version was raised (release).
//          See doorbell.hpp for waking.
// Bound    add() and remove() wait for one pass over the members at most.
// Exit     The object is never destroyed: a process may end with members left.
// Fork     fork_guard.hpp: in a child forked while members were there, add() throws UserError
//          and remove() does nothing.
// Checked by tests/cpp/transport/progress_thread_test.cc, tests/cpp/stress/
// progress_thread_stress.cc (TSan).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace rrfp {

// What the progress thread drives. progress() handles a bounded amount of work without blocking
// and returns how much; the thread sleeps when all members returned 0, until a wait_fd() (-1:
// none) is readable or the next tick. wait_fd() never changes.
class Progressing {
 public:
  virtual ~Progressing() = default;
  virtual std::size_t progress(std::int64_t now_ns) = 0;
  virtual void tick(std::int64_t now_ns) = 0;
  virtual int wait_fd() const = 0;
};

class ProgressThread {
 public:
  static constexpr std::int64_t kTickMs = 50;

  // The process's thread: started by the first add(), ended by the last remove().
  static ProgressThread& instance();

  void add(Progressing* member);
  void remove(Progressing* member);
  void set_spin_us(std::int64_t spin_us);
  // By a member, or about one: whether its wait_fd() wakes the thread; at first it does.
  void watch(Progressing* member, bool on);
  // By a member: the thread makes a pass soon, whatever the descriptors say.
  void look();

 private:
  ProgressThread();
  ~ProgressThread();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rrfp
