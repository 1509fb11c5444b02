// A policy over the steps of one simulated training: what it has learnt goes on from step to step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <memory_resource>
#include <numeric>
#include <utility>
#include <vector>

#include "runtime/virtual_run.hpp"
#include "sim/guard.hpp"
#include "sim/variability.hpp"
#include "sim/world.hpp"

namespace rrfp::sim {

struct Policy {
  const char* name;
  const char* hint;
  std::int32_t slack;
  bool split;
  bool waiting = true;
  bool guarded = false;
  bool weight_fills = false;  // W as filler at any limit, where "auto" has it with room only
};

struct Shape {
  std::int32_t num_ranks;
  std::int32_t num_microbatches;
};

// Times of one step, whether drawn or constant.
struct Times {
  std::function<std::int64_t(const Task&)> duration_ns;
  std::function<std::int64_t(const Task&)> latency_ns;
  std::vector<double> costs;
};

// Keeps to half the limit of its plan: the plan's rule is that of the whole limit.
struct KeepsToHalf : StepEngine {
  KeepsToHalf(std::shared_ptr<const StepPlan> plan, std::int32_t rank, TaskTimes* times,
              std::unique_ptr<StepAgreement> agreement, std::pmr::memory_resource* memory)
      : StepEngine(plan, rank, times, half_of(plan->arbiter_options(rank)),
                   std::move(agreement), memory) {}
  static ArbiterOptions half_of(ArbiterOptions options) {
    options.limit_units /= 2;
    return options;
  }
};

class Training {
 public:
  // With `fifo`, messages of one rank to another arrive in the order sent.
  Training(Shape shape, const Policy& policy, std::int32_t limit, bool mid, bool fifo)
      : shape_(shape), policy_(policy), limit_(limit), mid_(mid), fifo_(fifo) {
    std::vector<std::int32_t> ranks(shape.num_ranks);
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<std::pair<std::int32_t, std::int32_t>> edges;
    for (std::int32_t s = 1; s < shape.num_ranks; ++s) edges.emplace_back(s - 1, s);
    graph_ = std::make_shared<StageGraph>(shape.num_ranks, ranks, edges,
                                          std::vector<std::int32_t>{});
    times_.assign(shape.num_ranks, TaskTimes(1));
  }

  // Of the next step.
  double makespan_ns(const Times& times) {
    std::shared_ptr<const StepPlan> plan = make_plan(times);
    if (policy_.guarded && is_guarded(*plan)) {
      plan = guarded_plan(plan, guard(plan, records_, times.costs, ++num_steps_));
    }
    const auto ns = policy_.weight_fills ? run<KeepsToHalf>(plan, times)
                                         : run<StepEngine>(plan, times);
    if (policy_.guarded) remember(times);
    return static_cast<double>(ns);
  }

 private:
  std::shared_ptr<const StepPlan> make_plan(const Times& times) const {
    StepOptions options;
    options.num_microbatches = shape_.num_microbatches;
    options.hint = policy_.hint;
    options.slack = policy_.slack;
    options.split_backward = policy_.split;
    options.waiting = policy_.waiting;
    options.limits.assign(shape_.num_ranks, policy_.weight_fills ? 2 * limit_ : limit_);
    if (mid_) options.microbatch_order = mid_order(times.costs);
    return std::make_shared<StepPlan>(graph_, options);
  }

  template <class Engine>
  std::int64_t run(const std::shared_ptr<const StepPlan>& plan, const Times& times) {
    std::vector<std::int64_t> latest_ns(2 * static_cast<std::size_t>(shape_.num_ranks), 0);
    VirtualModel model;
    model.duration_ns = times.duration_ns;
    model.arrival_ns = [&](const Task& from, std::int32_t target_stage, std::int64_t now_ns) {
      // A stage sends to the one behind it and to the one before it.
      std::int64_t& link_ns = latest_ns[2 * from.stage + (target_stage > from.stage)];
      std::int64_t at_ns = now_ns + times.latency_ns(from);
      if (fifo_) at_ns = std::max(at_ns, link_ns);
      return link_ns = std::max(link_ns, at_ns), at_ns;
    };
    model.times = &times_;
    const VirtualOutcome outcome = run_virtually<Engine>(plan, model);
    if (!outcome.finished) std::abort();
    return outcome.makespan_ns;
  }

  // What the step leaves for the guard.
  void remember(const Times& times) {
    StepRecord record;
    record.num_microbatches = shape_.num_microbatches;
    record.costs = times.costs;
    for (std::int32_t kind = 0; kind < kNumTaskKinds; ++kind) {
      for (std::int32_t stage = 0; stage < shape_.num_ranks; ++stage) {
        for (std::int32_t m = 0; m < shape_.num_microbatches; ++m) {
          const Task task{stage, static_cast<TaskKind>(kind), m};
          const bool is_used = task.kind == TaskKind::kForward ||
                               (task.kind != TaskKind::kBackward) == policy_.split;
          const bool is_sent = is_used && !graph_->targets_of(task).empty();
          record.durations_ns.push_back(is_used ? times.duration_ns(task) : -1);
          record.travels_ns.push_back(is_sent ? times.latency_ns(task) : -1);
        }
      }
    }
    if (records_.size() == kGuardSteps) records_.erase(records_.begin());
    records_.push_back(std::move(record));
  }

  Shape shape_;
  Policy policy_;
  std::int32_t limit_;
  bool mid_;
  bool fifo_;
  std::shared_ptr<const StageGraph> graph_;
  std::vector<TaskTimes> times_;
  std::vector<StepRecord> records_;
  std::uint64_t num_steps_ = 0;
};

}  // namespace rrfp::sim
