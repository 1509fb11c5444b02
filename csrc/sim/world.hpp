// World: the step engines of all ranks on a virtual clock with a simulated network.
// Deterministic: the same plan, durations and latencies give the same schedule, to the tick.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/step_engine.hpp"
#include "runtime/virtual_run.hpp"

namespace rrfp::sim {

struct WorldOptions {
  // Virtual nanoseconds the task takes on its rank.
  std::function<std::int64_t(const Task&)> duration_ns;
  // Virtual nanoseconds from the sender's retire to the receiver's deliver().
  std::function<std::int64_t(const Task& from, std::int32_t target_stage)> latency_ns;
  // Messages of one directed pair of ranks arrive in the order sent.
  bool fifo_links = false;
  // How long after its arrival a message comes once more; -1: it does not. May be empty.
  std::function<std::int64_t(const Task& from, std::int32_t target_stage)> again_after_ns;
  // Whether a message is lost: the step cannot finish. May be empty.
  std::function<bool(const Task& from, std::int32_t target_stage)> is_lost;
  // See VirtualModel.
  std::int64_t announcement_lag_ns = 0;
  std::vector<TaskTimes>* times = nullptr;
};

using SimTask = VirtualTask;

struct WorldResult {
  bool finished = false;                     // false: deadlock; `ranks` holds what ran
  std::int64_t makespan_ns = 0;
  std::vector<std::vector<SimTask>> ranks;   // per rank, in the order run
  std::vector<std::int32_t> peak_units;      // per rank
  std::int64_t messages = 0;
  std::int64_t reordered = 0;    // arrive before one that was sent earlier on the same link
  std::int64_t lost = 0;
  std::int64_t duplicates = 0;
  std::int64_t limit_hits = 0;   // looks that found a forward held back by the limit alone
  std::int64_t slack_hits = 0;   // looks that found a task held back by the hint
  std::int64_t hint_waits = 0;   // looks that chose to wait for an announced task
  std::int64_t overtakes = 0;    // tasks that ran before one the hint puts first
};

WorldResult simulate(std::shared_ptr<const StepPlan> plan, const WorldOptions& options);

}  // namespace rrfp::sim
