// ProgressThread and the fork guard: starting, ending, exiting, forking.
#include "comm/progress_thread.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>

#include "base/check.hpp"
#include "check.hpp"
#include "comm/doorbell.hpp"
#include "transport/recording_sink.hpp"

namespace rrfp::test {

// Counts; wakes by its own doorbell.
struct Counter : Progressing {
  std::size_t progress(std::int64_t) override {
    CHECK(!removed);
    ++passes;
    doorbell.answer();
    if (wanted.exchange(false)) {
      ++handled;
      return 1;
    }
    return doorbell.try_sleep() ? 0 : 1;
  }
  void tick(std::int64_t) override { ++ticks; }
  int wait_fd() const override { return fd; }
  Doorbell doorbell;
  int fd = -1;
  std::atomic<int> passes{0}, handled{0}, ticks{0};
  std::atomic<bool> wanted{false}, removed{false};
};

int num_threads_named(const std::string& name) {
  int count = 0;
  DIR* tasks = opendir("/proc/self/task");
  while (const dirent* task = readdir(tasks)) {
    std::ifstream comm(std::string("/proc/self/task/") + task->d_name + "/comm");
    std::string line;
    if (std::getline(comm, line) && line == name) ++count;
  }
  closedir(tasks);
  return count;
}

// The status of a child that ran `body` and exited with what it returned; -1: it hung.
int in_child(int (*body)()) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) exit(body());
  int status = 0;
  const bool ended = eventually([&] { return waitpid(child, &status, WNOHANG) == child; });
  if (!ended) kill(child, SIGKILL);
  return ended && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_CASE(it_starts_ticks_and_ends) {
  for (int round = 0; round < 20; ++round) {
    CHECK(num_threads_named("rrfp-progress") == 0);
    Counter one, two;
    ProgressThread::instance().add(&one);
    ProgressThread::instance().add(&two);
    CHECK(num_threads_named("rrfp-progress") == 1);
    CHECK(eventually([&] { return one.ticks >= 1 && two.ticks >= 2; }));
    ProgressThread::instance().remove(&one);
    one.removed = true;
    const int ticks = two.ticks;
    CHECK(eventually([&] { return two.ticks > ticks; }));
    ProgressThread::instance().remove(&two);
    two.removed = true;
    ProgressThread::instance().remove(&two);  // twice: nothing
  }
  CHECK(num_threads_named("rrfp-progress") == 0);
}

// Catches a lost wake-up: without a descriptor only ticks come, with one the work is at once.
TEST_CASE(it_sleeps_and_wakes) {
  Counter sleeper;
  int pipe_fds[2];
  CHECK(pipe2(pipe_fds, O_NONBLOCK | O_CLOEXEC) == 0);
  sleeper.fd = pipe_fds[0];
  ProgressThread::instance().add(&sleeper);
  CHECK(eventually([&] { return sleeper.ticks >= 10; }));
  CHECK(sleeper.passes < 40);  // it slept in between
  sleeper.wanted = true;
  CHECK(write(pipe_fds[1], "x", 1) == 1);
  CHECK(eventually([&] { return sleeper.handled == 1; }));
  ProgressThread::instance().remove(&sleeper);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

TEST_CASE(it_spins_when_told_to) {
  Counter spinner;
  ProgressThread::instance().set_spin_us(1000000);
  ProgressThread::instance().add(&spinner);
  spinner.wanted = true;  // it spins after work, not for the sake of it
  CHECK(eventually([&] { return spinner.passes > 5000; }));
  ProgressThread::instance().remove(&spinner);
  ProgressThread::instance().set_spin_us(0);
}

// Signals belong to the main thread.
TEST_CASE(it_blocks_all_signals) {
  struct Looker : Counter {
    void tick(std::int64_t) override {
      sigset_t blocked;
      pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
      if (sigismember(&blocked, SIGINT) && sigismember(&blocked, SIGTERM)) ++ticks;
    }
  } looker;
  ProgressThread::instance().add(&looker);
  CHECK(eventually([&] { return looker.ticks > 0; }));
  ProgressThread::instance().remove(&looker);
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  CHECK(!sigismember(&blocked, SIGINT));
}

TEST_CASE(a_process_may_exit_with_members_left) {
  CHECK(in_child([] {
    static Counter forgotten;
    ProgressThread::instance().add(&forgotten);
    return 7;
  }) == 7);
}

// A child forked in use has none of our descriptors, and is told so.
TEST_CASE(a_forked_child_is_cut_off) {
  static Counter member;
  static Descriptor ours = Descriptor::open([] { return dup(0); });
  static const int inherited_fd = ours.get();
  ProgressThread::instance().add(&member);
  CHECK(in_child([] {
    if (!process_was_forked()) return 1;
    if (fcntl(inherited_fd, F_GETFD) != -1) return 2;
    // The number may be given out again; nothing of ours may close it then.
    const int reused = dup2(0, inherited_fd);
    ours.close();
    if (fcntl(reused, F_GETFD) == -1) return 3;
    try {
      ProgressThread::instance().add(&member);
      return 4;
    } catch (const UserError&) {
    }
    ProgressThread::instance().remove(&member);
    return 0;
  }) == 0);
  CHECK(!process_was_forked());
  CHECK(fcntl(inherited_fd, F_GETFD) != -1);
  ProgressThread::instance().remove(&member);
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
