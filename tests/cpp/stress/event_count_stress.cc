// EventCount with more threads than cores: no wake-up is lost. Waiters ask for an hour, so a
// lost one shows as a hang, which the watchdog turns into a failure; no time is measured.
#include "base/event_count.hpp"

#include <unistd.h>

#include <csignal>
#include <thread>
#include <vector>

#include "check.hpp"
#include "comm/wake_bell.hpp"

namespace rrfp {
namespace {

constexpr std::int64_t kHourNs = 3600LL * 1000000000LL;
constexpr unsigned kWatchdogSeconds = 120;

void watchdog_fired(int) {
  constexpr char kMessage[] = "event_count_stress: a thread was never woken\n";
  (void)!write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  _exit(1);
}

template <class Event, class Condition>
void wait_until(Event& event, Condition condition) {
  while (!condition()) {
    const std::uint32_t ticket = event.prepare();
    if (condition()) return;
    event.wait(ticket, kHourNs);
  }
}

// Two threads hand a turn back and forth; each hand-over is one wake-up that must not be lost.
TEST_CASE(a_turn_handed_over_is_never_lost) {
  constexpr std::uint32_t kTurns = 20000;
  EventCount event;
  std::atomic<std::uint32_t> turn{0};
  std::uint64_t passed = 0;  // plain: handed over with the turn (release below, acquire there)
  const auto player = [&](std::uint32_t parity) {
    for (std::uint32_t t = parity; t < kTurns; t += 2) {
      wait_until(event, [&] { return turn.load(std::memory_order_acquire) == t; });
      CHECK(passed == t);
      ++passed;
      turn.store(t + 1, std::memory_order_release);
      event.notify();
    }
  };
  std::thread other([&] { player(1); });
  player(0);
  other.join();
  CHECK(passed == kTurns);
}

// The same with one player asleep on a descriptor as well, which nobody ever writes to.
TEST_CASE(a_bell_wakes_who_also_polls) {
  constexpr std::uint32_t kTurns = 20000;
  WakeBell bells[2];
  Descriptor silent = Descriptor::open([] { return eventfd(0, EFD_CLOEXEC); });
  bells[0].open();
  std::atomic<std::uint32_t> turn{0};
  std::uint64_t passed = 0;  // plain: handed over with the turn
  const auto play = [&](std::uint32_t parity, const auto& wait) {
    for (std::uint32_t t = parity; t < kTurns; t += 2) {
      while (turn.load(std::memory_order_acquire) != t) {
        const std::uint32_t ticket = bells[parity].prepare();
        if (turn.load(std::memory_order_acquire) != t) wait(ticket);
      }
      ++passed;
      turn.store(t + 1, std::memory_order_release);
      bells[1 - parity].notify();
    }
  };
  std::thread other(
      [&] { play(1, [&](std::uint32_t ticket) { bells[1].wait(ticket, kHourNs); }); });
  play(0, [&](std::uint32_t ticket) { bells[0].wait_or_readable(ticket, kHourNs, silent.get()); });
  other.join();
  CHECK(passed == kTurns);
}

// Four notifiers, three waiters, each waiting for the count to pass a mark of its own: a
// notify() must wake all who sleep, because it does not know whose mark was passed.
TEST_CASE(a_notify_reaches_every_waiter) {
  constexpr int kNotifiers = 4, kWaiters = 3;
  constexpr std::uint64_t kEach = 3000;
  EventCount event;
  std::atomic<std::uint64_t> count{0};
  std::vector<std::thread> threads;
  for (int w = 0; w < kWaiters; ++w) {
    threads.emplace_back([&, w] {
      for (std::uint64_t mark = 1 + w; mark <= kNotifiers * kEach; mark += 1 + w) {
        wait_until(event, [&] { return count.load(std::memory_order_relaxed) >= mark; });
      }
    });
  }
  for (int n = 0; n < kNotifiers; ++n) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        count.fetch_add(1, std::memory_order_relaxed);
        event.notify();
        if (i % 16 == 0) std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(count == kNotifiers * kEach);
}

TEST_CASE(a_wait_ends_without_a_notify) {
  EventCount event;
  event.wait(event.prepare(), 1000000);
  event.wait(event.prepare(), 0);
  event.wait(event.prepare(), -1);
  const std::uint32_t old_ticket = event.prepare();
  event.notify();
  event.wait(old_ticket, kHourNs);  // the epoch has moved on: returns at once
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) {
  std::signal(SIGALRM, rrfp::watchdog_fired);
  alarm(rrfp::kWatchdogSeconds);
  return rrfp::test::run(argc, argv);
}
