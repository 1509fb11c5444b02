// What it costs to say that a task is ready and to take the best one.
//
//   bench_ready_set instructions ready_set|ready_set_batch|arbiter [pairs]
//       One thread, 4,096 tasks in random order; for callgrind (ready_set_cost.py), which
//       counts only inside the functions named measured_*. Prints the number of pairs.
//   bench_ready_set contended [rounds]
//       Four producers and one worker on sets of 4,096 tasks: ReadySet and a std::set under a
//       mutex in turn. Prints JSON: median nanoseconds a task of each, and their ratio.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "arbiter/named_orders.hpp"

namespace rrfp {
namespace {

constexpr std::int32_t kNumTasks = 4096;
constexpr int kNumProducers = 4;
constexpr int kSetsPerRound = 32;

std::vector<std::int32_t> shuffled_tasks(std::uint64_t seed) {
  std::vector<std::int32_t> tasks(kNumTasks);
  std::iota(tasks.begin(), tasks.end(), 0);
  std::shuffle(tasks.begin(), tasks.end(), std::mt19937_64(seed));
  return tasks;
}

// The peer: the same interface over a mutex and a std::set.
class LockedSet {
 public:
  explicit LockedSet(const std::vector<std::int32_t>&) : arrived_(kNumTasks, false) {}

  bool arrive(std::int32_t, std::int32_t index) {
    const std::lock_guard lock(mutex_);
    if (arrived_[index]) return false;
    arrived_[index] = true;
    ready_.insert(index);
    return true;
  }
  std::int32_t head(std::int32_t) {
    const std::lock_guard lock(mutex_);
    return ready_.empty() ? -1 : *ready_.begin();
  }
  bool claim(std::int32_t, std::int32_t index) {
    const std::lock_guard lock(mutex_);
    return ready_.erase(index) == 1;
  }

 private:
  std::mutex mutex_;
  std::set<std::int32_t> ready_;
  std::vector<bool> arrived_;
};

// A task arrives and is taken before the next one arrives: the idle worker.
[[gnu::noinline]] int measured_ready_set(ReadySet<>& ready,
                                         const std::vector<std::int32_t>& tasks) {
  int pairs = 0;
  for (const std::int32_t task : tasks) {
    const bool is_new = ready.arrive(0, task);
    pairs += is_new && ready.claim(0, ready.head(0)) ? 1 : 0;
  }
  return pairs;
}

// All tasks arrive, then the worker takes them in order of position: the busy worker.
[[gnu::noinline]] int measured_ready_set_batch(ReadySet<>& ready,
                                               const std::vector<std::int32_t>& tasks) {
  int pairs = 0;
  for (const std::int32_t task : tasks) ready.arrive(0, task);
  for (std::int32_t head = ready.head(0); head >= 0; head = ready.head(0)) {
    pairs += ready.claim(0, head) ? 1 : 0;
  }
  return pairs;
}

// Forwards in random order, each followed by its backward, through the whole decision: bf with
// 2,048 microbatches, a limit, and the skip count.
[[gnu::noinline]] int measured_arbiter(Arbiter& arbiter, const std::vector<std::int32_t>& tasks) {
  for (const std::int32_t task : tasks) {
    if (task >= kNumTasks / 2) continue;
    arbiter.arrive(task);
    arbiter.commit(arbiter.select());
    arbiter.arrive(task + kNumTasks / 2);
    arbiter.commit(arbiter.select());
  }
  return arbiter.num_claimed();
}

int count_instructions(const char* what, int num_pairs) {
  std::vector<std::int32_t> given(kNumTasks / 2);
  std::iota(given.begin(), given.end(), 0);
  const TaskTable table({0}, {TaskKind::kForward, TaskKind::kBackward}, kNumTasks / 2);
  const HintOrder order(table, HintRule::kBackwardForward, one_f_one_b_order(0, 8, given));
  int pairs = 0;
  while (pairs < num_pairs) {
    const auto tasks = shuffled_tasks(static_cast<std::uint64_t>(pairs));
    ReadySet<> ready({kNumTasks});
    if (std::strcmp(what, "ready_set") == 0) {
      pairs += measured_ready_set(ready, tasks);
    } else if (std::strcmp(what, "ready_set_batch") == 0) {
      pairs += measured_ready_set_batch(ready, tasks);
    } else {
      Arbiter arbiter(table, order, {.limit_units = 8}, given);
      pairs += measured_arbiter(arbiter, tasks);
    }
  }
  std::printf("%d\n", pairs);
  return 0;
}

// Nanoseconds a task, from the start of the producers to the last claim. The producers go
// through the sets of the round without a pause, the worker behind them.
template <class Set>
double contended_round(const std::vector<std::int32_t>& tasks) {
  std::vector<std::unique_ptr<Set>> sets;
  for (int s = 0; s < kSetsPerRound; ++s) {
    sets.push_back(std::make_unique<Set>(std::vector<std::int32_t>{kNumTasks}));
  }
  std::latch start(kNumProducers + 1);
  std::vector<std::thread> producers;
  for (int p = 0; p < kNumProducers; ++p) {
    producers.emplace_back([&, p] {
      start.arrive_and_wait();
      for (const auto& ready : sets) {
        for (std::int32_t i = p; i < kNumTasks; i += kNumProducers) ready->arrive(0, tasks[i]);
      }
    });
  }
  start.arrive_and_wait();
  const auto from = std::chrono::steady_clock::now();
  for (const auto& ready : sets) {
    for (std::int32_t claimed = 0; claimed < kNumTasks;) {
      const std::int32_t head = ready->head(0);
      if (head >= 0 && ready->claim(0, head)) {
        ++claimed;
      } else {
        std::this_thread::yield();
      }
    }
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - from;
  for (std::thread& producer : producers) producer.join();
  return took.count() / (kNumTasks * kSetsPerRound);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

int compare_contended(int num_rounds) {
  std::vector<double> lock_free, locked;
  for (int round = 0; round < num_rounds; ++round) {
    const auto tasks = shuffled_tasks(static_cast<std::uint64_t>(round));
    lock_free.push_back(contended_round<ReadySet<>>(tasks));
    locked.push_back(contended_round<LockedSet>(tasks));
  }
  std::printf("{\"rounds\": %d, \"ready_set_ns\": %.1f, \"locked_set_ns\": %.1f, "
              "\"ratio\": %.2f}\n",
              num_rounds, median(lock_free), median(locked), median(locked) / median(lock_free));
  return 0;
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) {
  const auto is = [&](int at, const char* word) {
    return argc > at && std::strcmp(argv[at], word) == 0;
  };
  if (is(1, "instructions") &&
      (is(2, "ready_set") || is(2, "ready_set_batch") || is(2, "arbiter"))) {
    return rrfp::count_instructions(argv[2], argc > 3 ? std::atoi(argv[3]) : 4096);
  }
  if (is(1, "contended")) {
    return rrfp::compare_contended(argc > 2 ? std::max(std::atoi(argv[2]), 1) : 31);
  }
  std::fprintf(stderr,
               "usage: bench_ready_set instructions ready_set|ready_set_batch|arbiter [pairs]\n"
               "       bench_ready_set contended [rounds]\n");
  return 2;
}
