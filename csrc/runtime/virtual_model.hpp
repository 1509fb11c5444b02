// VirtualModel: what a simulated step is made of: how long tasks and messages take. VirtualOutcome:
// what came of it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "arbiter/task_times.hpp"
#include "base/task.hpp"

namespace rrfp {

inline constexpr std::int64_t kNever = INT64_MAX;  // a message that is lost

struct VirtualModel {
  using ArrivalNs = std::function<std::int64_t(const Task& from, std::int32_t target_stage,
                                               std::int64_t now_ns)>;
  std::function<std::int64_t(const Task&)> duration_ns;
  // When what `from` retired at now_ns reaches `target_stage` on another rank.
  ArrivalNs arrival_ns;
  // When it does so once more, not before; kNever: it does not. May be empty.
  ArrivalNs again_ns;
  // From the start of a task to the arrival of its announcement, where the plan waits.
  std::int64_t announcement_lag_ns = 0;
  // What earlier steps have taught, by rank, for this one to use and add to; null: nothing.
  std::vector<TaskTimes>* times = nullptr;
  // Told of every look at the ready set; may be empty.
  std::function<void(std::int32_t rank, const Choice&)> on_choice;
};

struct VirtualTask {
  Task task;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

struct VirtualOutcome {
  bool finished = false;                        // false: deadlock; `ranks` holds what ran
  std::int64_t makespan_ns = 0;
  std::vector<std::vector<VirtualTask>> ranks;  // per rank, in the order run
  std::vector<std::int32_t> peak_units;         // per rank
};

}  // namespace rrfp
