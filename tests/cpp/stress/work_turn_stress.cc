// WorkTurn under more threads than cores: whoever has the turn is alone, every wait ends, and a
// thread that keeps the turn holds the others up once, not for good.
#include "runtime/work_turn.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"

namespace rrfp {
namespace {

constexpr int kNumThreads = 6;

void run_side_by_side(int num_threads, const auto& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE(the_turn_is_of_one_thread_at_a_time) {
  constexpr int kRounds = 3000;
  WorkTurn turn;
  std::uint64_t passed = 0;  // plain: handed over with the turn
  std::atomic<std::uint64_t> had{0};
  for (int step = 0; step < 3; ++step) {
    turn.start_step(true);
    run_side_by_side(kNumThreads, [&] {
      for (int round = 0; round < kRounds; ++round) {
        if (!turn.take()) continue;  // somebody was kept from running for longer than the patience
        ++passed;
        had.fetch_add(1, std::memory_order_relaxed);
        turn.give();
      }
    });
  }
  CHECK(passed == had.load());
  CHECK(passed > 0);
}

TEST_CASE(who_waits_too_long_goes_on_without) {
  WorkTurn turn;
  turn.start_step(true);
  CHECK(turn.take());
  run_side_by_side(kNumThreads, [&] { CHECK(!turn.take()); });  // this thread keeps it meanwhile
  CHECK(!turn.is_on());
  turn.give();
  CHECK(!turn.take());  // off for the rest of the step
}

TEST_CASE(a_step_begins_with_the_turn_free) {
  WorkTurn turn;
  turn.start_step(true);
  CHECK(turn.take());  // and is not given back: its step ended early
  turn.start_step(true);
  CHECK(turn.take());
  turn.give();
  turn.start_step(false);
  CHECK(!turn.take());
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
