// The small cases in which ReadySet is explored, for the structure itself and for its mutants.
//
// Producers arrive; the worker looks, and claims what it finds. In every interleaving:
//   found     head() finds a task, none behind the first, once its arrive() has returned
//   ready     what head() found is ready and can be claimed
//   once      every task is claimed exactly once in the end, and arrived exactly once
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "arbiter/ready_set.hpp"
#include "model/model_atomic.hpp"

namespace rrfp::test {

enum class Look {
  kHead,      // the worker takes what head() finds
  kContains,  // it waits for particular tasks, as at slack 0
};

struct ReadySetCase {
  const char* name;
  std::int32_t num_tasks;
  std::vector<std::vector<std::int32_t>> producers;  // what each lets arrive, in order
  int num_looks;                                     // of the worker, while the producers run
  Look look = Look::kHead;
};

inline std::vector<ReadySetCase> ready_set_cases() {
  return {
      {"one level, one word", 64, {{3}, {5}}, 4},
      {"one level, three producers", 64, {{3}, {5}, {0}}, 3},
      {"two levels, one word", 128, {{3}, {5}}, 4},
      {"two levels, two words", 128, {{3}, {70}}, 4},
      {"two levels, three producers", 128, {{3}, {5}, {70}}, 3},
      {"two levels, one word twice", 128, {{3, 5}, {4}}, 3},
      {"two levels, one producer in two words", 128, {{70, 3}, {71}}, 3},
      {"three levels, two words", 4097, {{1}, {4096}}, 3},
      {"three levels, one word", 4097, {{4}, {2}}, 3},
      {"a task that two let arrive", 128, {{3}, {3}, {70}}, 3},
      {"particular tasks", 128, {{3, 70}, {5}}, 4, Look::kContains},
  };
}

template <class Steps>
struct ReadySetRun {
  explicit ReadySetRun(const ReadySetCase& of)
      : ready({of.num_tasks}), arrivals(of.num_tasks), claims(of.num_tasks) {}

  void produce(const std::vector<std::int32_t>& tasks) {
    for (const std::int32_t task : tasks) {
      // A second arrival returns at once: it promises nothing about the first.
      if (!ready.arrive(0, task)) continue;
      ++arrivals[task];
      returned.push_back(task);
    }
  }

  // The lowest task whose arrival has returned and that is not claimed, or -1.
  std::int32_t lowest_due() const {
    std::int32_t lowest = -1;
    for (const std::int32_t task : returned) {
      if (claims[task] == 0 && (lowest < 0 || task < lowest)) lowest = task;
    }
    return lowest;
  }

  bool look_at_head() {
    Explorer& explorer = *Explorer::current();
    const std::int32_t due = lowest_due();
    explorer.observe(static_cast<std::uint64_t>(due));
    const std::int32_t head = ready.head(0);
    explorer.check(due < 0 || (head >= 0 && head <= due), "found: an arrived task is not seen");
    if (head < 0) return false;
    explorer.check(ready.contains(0, head), "ready: what head() found is not ready");
    explorer.check(ready.claim(0, head), "ready: what head() found cannot be claimed");
    ++claims[head];
    return true;
  }

  void look_for(std::int32_t task) {
    if (claims[task] == 0 && ready.contains(0, task)) {
      Explorer::current()->check(ready.claim(0, task), "ready: it cannot be claimed");
      ++claims[task];
    }
  }

  void finish(const ReadySetCase& of) {
    Explorer& explorer = *Explorer::current();
    while (look_at_head()) {
    }
    for (const auto& tasks : of.producers) {
      for (const std::int32_t task : tasks) {
        explorer.check(claims[task] == 1, "once: a task was lost or claimed twice");
        explorer.check(arrivals[task] == 1, "once: a task arrived twice or never");
      }
    }
  }

  ReadySet<ModelAtomic, Steps> ready;
  std::vector<int> arrivals, claims;   // by task
  std::vector<std::int32_t> returned;  // arrivals that have returned
};

template <class Steps>
Exploration explore_ready_set(const ReadySetCase& of) {
  return Explorer::explore([&of] {
    auto run = std::make_shared<ReadySetRun<Steps>>(of);
    Program program;
    for (const auto& tasks : of.producers) {
      program.bodies.push_back([run, &tasks] { run->produce(tasks); });
    }
    program.bodies.push_back([run, &of] {
      for (int look = 0; look < of.num_looks; ++look) {
        Explorer::current()->step();
        if (of.look == Look::kHead) run->look_at_head();
        for (const auto& tasks : of.producers) {
          if (of.look == Look::kContains) run->look_for(tasks[look % tasks.size()]);
        }
      }
    });
    program.afterwards = [run, &of] { run->finish(of); };
    return program;
  });
}

}  // namespace rrfp::test
