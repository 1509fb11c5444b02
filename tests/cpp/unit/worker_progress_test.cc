// WorkerProgress: who calls progress() of a transport, how a waiting worker is woken, and that
// nothing is left lying between two holders. The transport is one that the test plays.
#include "runtime/worker_progress.hpp"

#include <sys/epoll.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "base/clock.hpp"
#include "check.hpp"
#include "comm/doorbell.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

constexpr std::int64_t kLongNs = 20000 * kNsPerMs;

// "Messages" are counts: arrive() adds one, progress() takes all and rings the worker's bell.
class CountingTransport final : public Transport {
 public:
  CountingTransport() : epoll_(Descriptor::open([] { return epoll_create1(EPOLL_CLOEXEC); })) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, doorbell_.fd(), &event) == 0);
  }
  void arrive() {
    waiting.fetch_add(1);
    doorbell_.ring();
  }
  std::size_t progress(std::int64_t) override {
    CHECK(num_inside_.fetch_add(1) == 0);
    doorbell_.answer();
    epoll_event event{};
    (void)epoll_wait(epoll_.get(), &event, 1, 0);
    const int taken = waiting.exchange(0);
    if (taken > 0) {
      mover = std::this_thread::get_id();
      num_moved.fetch_add(taken);
      if (bell != nullptr) bell->notify();
      if (num_echoes > 0) {
        --num_echoes;
        arrive();
      }
    }
    const bool is_idle = taken == 0 && doorbell_.try_sleep();
    num_inside_.fetch_sub(1);
    return is_idle ? 0 : 1;
  }
  int wait_fd() const override { return epoll_.get(); }

  const char* name() const override { return "counting"; }
  std::int32_t rank() const override { return 0; }
  std::int32_t num_ranks() const override { return 1; }
  bool shares_address_space() const override { return false; }
  void set_sink(MessageSink*) override {}
  void post_send(std::int32_t, OutboundMessage*) override {}
  void post_recv(RecvTicket, InboundMessage*) override {}
  void abort(const Status&) override {}

  WakeBell* bell = nullptr;
  int num_echoes = 0;  // of its holder: messages that come while others are moved
  std::atomic<int> waiting{0}, num_moved{0};
  std::atomic<std::thread::id> mover{};

 private:
  Descriptor epoll_;
  Doorbell doorbell_;
  std::atomic<int> num_inside_{0};
};

// A worker's surroundings: the transport in the progress thread, a bell.
struct Desk final : Progressing {
  explicit Desk(RuntimeOptions options_ = {}) : options(options_), progress_(transport, options) {
    options.worker_moves_messages = true;
    ProgressThread::instance().add(this);
    progress_.share(this);
    bell.open();
    transport.bell = &bell;
  }
  ~Desk() override { ProgressThread::instance().remove(this); }
  std::size_t progress(std::int64_t now_ns) override { return progress_.pass(now_ns); }
  void tick(std::int64_t) override { ++ticks; }
  int wait_fd() const override { return transport.wait_fd(); }

  // Until `count` messages were moved.
  void wait_for(WorkerProgress::Hold& hold, int count) {
    while (true) {
      const std::uint32_t ticket = bell.prepare();
      if (transport.num_moved >= count) return;
      hold.wait(bell, ticket, kLongNs);
    }
  }
  bool is_moved_to(int count) const {
    for (int i = 0; i < 20000 && transport.num_moved < count; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return transport.num_moved >= count;
  }

  RuntimeOptions options;
  CountingTransport transport;
  WakeBell bell;
  WorkerProgress progress_;
  std::atomic<int> ticks{0};
};

std::int64_t thread_cpu_ns() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return used.tv_sec * 1000 * kNsPerMs + used.tv_nsec;
}

std::thread after_ms(int delay_ms, std::function<void()> action) {
  return std::thread([delay_ms, action] {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    action();
  });
}

template <class Bell>
void wait_for_ring(WorkerProgress::Hold& hold, Bell& bell, std::uint32_t ticket) {
  const std::int64_t begin_ns = steady_now_ns();
  while (bell.prepare() == ticket) hold.wait(bell, ticket, kLongNs);
  CHECK(steady_now_ns() - begin_ns < kLongNs / 2);
}

}  // namespace

TEST_CASE(a_waiting_worker_moves_its_messages_itself) {
  Desk desk;
  for (int round = 1; round <= 20; ++round) {
    WorkerProgress::Hold hold(desk.progress_);
    std::thread peer = after_ms(2, [&] { desk.transport.arrive(); });
    desk.wait_for(hold, round);
    peer.join();
  }
  // But for messages that came while the thread was inside, which is rare.
  CHECK(desk.transport.mover.load() == std::this_thread::get_id());
}

TEST_CASE(a_bell_wakes_it_too) {
  Desk desk;
  const std::uint32_t ticket = desk.bell.prepare();
  std::thread other = after_ms(20, [&] { desk.bell.notify(); });
  WorkerProgress::Hold hold(desk.progress_);
  wait_for_ring(hold, desk.bell, ticket);
  other.join();
}

TEST_CASE(a_wait_ends_at_its_time_out) {
  Desk desk;
  WorkerProgress::Hold hold(desk.progress_);
  for (int i = 0; i < 5; ++i) hold.wait(desk.bell, desk.bell.prepare(), 2 * kNsPerMs);
  CHECK(desk.transport.num_moved == 0);
}

// With its ticks the progress thread would find everything in the end: as many as rounds would
// tell that it was not woken.
TEST_CASE(after_the_wait_the_progress_thread_moves_them) {
  Desk desk;
  const int ticks_before = desk.ticks;
  constexpr int kRounds = 200;
  for (int round = 1; round <= kRounds; ++round) {
    {
      WorkerProgress::Hold hold(desk.progress_);
      hold.wait(desk.bell, desk.bell.prepare(), kNsPerMs / 100);
      if (round % 2 == 0) desk.transport.arrive();
    }
    if (round % 2 != 0) desk.transport.arrive();
    CHECK(desk.is_moved_to(round));
  }
  CHECK(desk.ticks - ticks_before < kRounds / 2);
}

// A doorbell that is not asleep when the worker leaves wakes nobody: the thread must be told.
TEST_CASE(a_busy_transport_is_handed_over_awake) {
  Desk desk;
  const int ticks_before = desk.ticks;
  constexpr int kRounds = 50, kEchoes = 4;
  for (int round = 0; round < kRounds; ++round) {
    {
      WorkerProgress::Hold hold(desk.progress_);
      hold.wait(desk.bell, desk.bell.prepare(), kNsPerMs / 100);
      desk.transport.num_echoes = kEchoes;
      desk.transport.arrive();
    }
    CHECK(desk.is_moved_to((round + 1) * (kEchoes + 1)));
  }
  CHECK(desk.ticks - ticks_before < kRounds / 2);
}

TEST_CASE(what_is_lent_comes_back) {
  Desk desk;
  int moved_on_return = 0;
  for (int round = 1; round <= 50; ++round) {
    {
      WorkerProgress::Hold hold(desk.progress_);
      hold.wait(desk.bell, desk.bell.prepare(), kNsPerMs / 100);
      hold.lend();
    }
    desk.transport.arrive();
    const WorkerProgress::Hold back(desk.progress_);
    if (desk.transport.num_moved == round &&
        desk.transport.mover.load() == std::this_thread::get_id()) {
      ++moved_on_return;
    }
    CHECK(desk.is_moved_to(round));
  }
  CHECK(moved_on_return > 25);  // the others: the progress thread came by
}

TEST_CASE(a_borrower_who_stays_away_holds_nobody_up) {
  Desk desk;
  {
    WorkerProgress::Hold hold(desk.progress_);
    hold.wait(desk.bell, desk.bell.prepare(), kNsPerMs / 100);
    hold.lend();
  }
  desk.transport.arrive();
  CHECK(desk.is_moved_to(1));
  CHECK(desk.transport.mover.load() != std::this_thread::get_id());
  // And then it wakes for what comes later, as before.
  const int ticks_before = desk.ticks;
  for (int i = 2; i <= 50; ++i) {
    desk.transport.arrive();
    CHECK(desk.is_moved_to(i));
  }
  CHECK(desk.ticks - ticks_before < 45);
}

// A member of an agreement group: its bell is another, and rings for other things than messages.
TEST_CASE(a_member_with_a_core_to_spare_moves_messages_while_it_spins) {
  RuntimeOptions options;
  options.spin_us = 20000000;
  Desk desk(options);
  SharedEventCount group_bell;
  for (int round = 1; round <= 20; ++round) {
    WorkerProgress::Hold hold(desk.progress_);
    const std::uint32_t ticket = group_bell.prepare();
    std::thread peer = after_ms(2, [&] {
      desk.transport.arrive();
      CHECK(desk.is_moved_to(round));
      group_bell.notify();
    });
    wait_for_ring(hold, group_bell, ticket);
    peer.join();
  }
  CHECK(desk.transport.mover.load() == std::this_thread::get_id());
}

TEST_CASE(a_member_that_sleeps_leaves_its_messages_to_the_progress_thread) {
  for (const bool yields : {false, true}) {
    RuntimeOptions options;
    options.spin_us = 1000;
    options.spin_yields = yields;
    Desk desk(options);
    SharedEventCount group_bell;
    WorkerProgress::Hold hold(desk.progress_);
    const std::uint32_t ticket = group_bell.prepare();
    std::thread peer = after_ms(50, [&] {
      desk.transport.arrive();
      CHECK(desk.is_moved_to(1));
      group_bell.notify();
    });
    const std::int64_t used_ns = thread_cpu_ns();
    wait_for_ring(hold, group_bell, ticket);
    CHECK(thread_cpu_ns() - used_ns < 30 * kNsPerMs);
    CHECK(desk.transport.mover.load() != std::this_thread::get_id());
    peer.join();
  }
}

TEST_CASE(a_long_wait_burns_no_core) {
  for (const bool yields : {false, true}) {
    RuntimeOptions options;
    options.spin_us = 2000;
    options.spin_yields = yields;
    Desk desk(options);
    WorkerProgress::Hold hold(desk.progress_);
    const std::int64_t begin_ns = steady_now_ns(), used_ns = thread_cpu_ns();
    while (steady_now_ns() - begin_ns < 300 * kNsPerMs) {
      hold.wait(desk.bell, desk.bell.prepare(), 10 * kNsPerMs);
    }
    CHECK(thread_cpu_ns() - used_ns < 60 * kNsPerMs);
  }
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
