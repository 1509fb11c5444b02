// ProgressTurn in every interleaving of a worker, the progress thread and somebody who closes the
// pipeline: never two inside a transport. Two weakened turns must be found.
#include "comm/progress_turn.hpp"

#include <functional>
#include <memory>
#include <vector>

#include "check.hpp"
#include "model/explorer.hpp"
#include "model/model_atomic.hpp"

namespace rrfp::test {

// Looks, then acts: another may have come between.
template <class T>
struct ForgetfulAtomic : ModelAtomic<T> {
  bool compare_exchange_strong(T& expected, T desired, std::memory_order order,
                               std::memory_order) {
    const T before = this->load(order);
    if (before != expected) return false;
    this->store(desired, order);
    return true;
  }
};

// The thread comes in also while the worker is inside, as if it had only lent the transport.
struct IntrusiveTurn : ProgressTurn<ModelAtomic> {
  TurnHolder enter() {
    if (take()) return TurnHolder::kNobody;
    lend();
    return take_lent() ? TurnHolder::kLent : TurnHolder::kThread;
  }
};

template <class Turn>
struct TurnRun {
  void pass() {
    Explorer::current()->check(++num_inside == 1, "two are inside the transport");
    busy.store(busy.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    --num_inside;
  }
  void worker() {
    if (!turn.take()) return;
    pass();
    turn.lend();
    if (!turn.take_lent()) return;
    pass();
    turn.give_back();
  }
  void thread(int num_passes) {
    while (num_passes-- > 0) {
      if (turn.enter() == TurnHolder::kThread) continue;
      pass();
      turn.leave();
    }
  }
  void closer() {
    if (!turn.take_lent()) return;
    pass();
    turn.give_back();
  }

  Turn turn;
  ModelAtomic<std::uint64_t> busy;  // so that being inside takes a while
  int num_inside = 0;
};

template <class Turn>
Exploration explore(int num_workers) {
  return Explorer::explore([num_workers] {
    auto run = std::make_shared<TurnRun<Turn>>();
    Program program;
    for (int i = 0; i < num_workers; ++i) program.bodies.push_back([run] { run->worker(); });
    program.bodies.push_back([run] { run->thread(2); });
    program.bodies.push_back([run] { run->closer(); });
    program.afterwards = [run] {
      // Whatever happened, somebody can move messages.
      Explorer::current()->check(run->turn.enter() != TurnHolder::kThread, "a turn is lost");
    };
    return program;
  });
}

TEST_CASE(one_at_a_time) {
  for (const int num_workers : {1, 2}) {
    const Exploration result = explore<ProgressTurn<ModelAtomic>>(num_workers);
    std::printf("  %d workers: %lld runs, %lld states\n", num_workers,
                static_cast<long long>(result.runs), static_cast<long long>(result.states));
    CHECK(result.runs > 100);
    if (result.violations > 0) fail(__FILE__, __LINE__, result.first_violation);
  }
}

TEST_CASE(weakened_turns_are_found) {
  CHECK(explore<ProgressTurn<ForgetfulAtomic>>(1).violations > 0);
  CHECK(explore<IntrusiveTurn>(1).violations > 0);
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_model(argc, argv); }
