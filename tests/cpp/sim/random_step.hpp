// RandomStep: one seeded step of the simulated world: plan, durations, latencies.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "runtime/step_plan.hpp"
#include "sim/world.hpp"

namespace rrfp::test {

class RandomStep {
 public:
  explicit RandomStep(std::uint64_t seed) : random_(seed) {
    num_ranks_ = draw(1, 8);
    num_microbatches_ = draw(1, 24);
    make_options();
    make_times();
  }

  const StepOptions& options() const { return options_; }
  std::int32_t num_ranks() const { return num_ranks_; }
  std::int32_t num_microbatches() const { return num_microbatches_; }
  bool fifo_links() const { return fifo_links_; }

  std::shared_ptr<const StepPlan> plan() const { return plan_with(options_); }
  std::shared_ptr<const StepPlan> plan_with(const StepOptions& options) const {
    return std::make_shared<StepPlan>(graph(), options);
  }

  std::int64_t duration_ns(const Task& task) const { return durations_ns_[index(task)]; }
  std::int64_t latency_ns(const Task& from) const { return latencies_ns_[index(from)]; }

  std::string text() const {
    std::string limits;
    for (const std::int32_t limit : options_.limits) limits += std::to_string(limit) + " ";
    return std::to_string(num_ranks_) + " ranks, " + std::to_string(num_microbatches_) +
           " microbatches, hint " + options_.hint + ", slack " + std::to_string(options_.slack) +
           ", limits " + limits + (fifo_links_ ? "fifo" : "reordering");
  }

 private:
  std::int32_t draw(std::int32_t least, std::int32_t most) {
    return std::uniform_int_distribution<std::int32_t>(least, most)(random_);
  }

  std::shared_ptr<const StageGraph> graph() const {
    std::vector<std::int32_t> ranks(num_ranks_);
    std::iota(ranks.begin(), ranks.end(), 0);
    std::vector<std::pair<std::int32_t, std::int32_t>> edges;
    for (std::int32_t stage = 1; stage < num_ranks_; ++stage) edges.emplace_back(stage - 1, stage);
    return std::make_shared<StageGraph>(num_ranks_, ranks, edges, std::vector<std::int32_t>{});
  }

  std::size_t index(const Task& task) const {
    const std::size_t kind = task.kind == TaskKind::kForward ? 0 : 1;
    return (kind * num_ranks_ + task.stage) * num_microbatches_ + task.microbatch;
  }

  std::vector<std::int32_t> permutation() {
    std::vector<std::int32_t> order(num_microbatches_);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }

  void make_options() {
    const char* hints[] = {"gpipe", "1f1b",       "bf",         "fb",
                           "auto",  "b-priority", "f-priority", "order"};
    const std::int32_t slacks[] = {0, 1, 3, kUnlimited, kUnlimited};
    options_.hint = hints[draw(0, 7)];
    options_.slack = slacks[draw(0, 4)];
    options_.num_microbatches = num_microbatches_;
    options_.waiting = false;
    if (options_.hint == "order") {
      options_.order = own_order();
    } else if (draw(0, 1) == 1) {
      options_.microbatch_order = permutation();
    }
    if (draw(0, 3) == 0) return;  // the default limits
    const bool is_rule = options_.hint != "gpipe" && options_.hint != "1f1b" &&
                         options_.hint != "order";
    const auto unlimited = options_.slack == 0 && !is_rule ? plan() : nullptr;
    for (std::int32_t rank = 0; rank < num_ranks_; ++rank) {
      // A fixed order of its own cannot do with less than its peak.
      const std::int32_t least = unlimited ? unlimited->limit_units(rank) : 1;
      options_.limits.push_back(draw(least, std::max(least, 2 * num_ranks_)));
    }
  }

  // Tasks in an order that can run (unlimited slack: in any order at all); with bounded slack
  // the forwards of all stages in one order of microbatches.
  std::vector<Task> own_order() {
    const std::vector<std::int32_t> forwards = permutation();
    std::vector<Task> order;
    std::vector<Task> open;
    for (std::int32_t stage = 0; stage < num_ranks_; ++stage) {
      for (std::int32_t m = 0; m < num_microbatches_; ++m) {
        open.push_back({stage, TaskKind::kForward, m});
        open.push_back({stage, TaskKind::kBackward, m});
      }
    }
    std::shuffle(open.begin(), open.end(), random_);
    if (options_.slack == kUnlimited) return open;
    const auto has_run = [&](std::int32_t stage, TaskKind kind, std::int32_t m) {
      return std::find(order.begin(), order.end(), Task{stage, kind, m}) != order.end();
    };
    const auto may_run = [&](const Task& task) {
      const std::int32_t m = task.microbatch;
      if (task.kind == TaskKind::kBackward) {
        return has_run(task.stage, TaskKind::kForward, m) &&
               (task.stage == num_ranks_ - 1 || has_run(task.stage + 1, TaskKind::kBackward, m));
      }
      if (task.stage > 0 && !has_run(task.stage - 1, TaskKind::kForward, m)) return false;
      const auto place = std::find(forwards.begin(), forwards.end(), m);
      return options_.slack == 0 || place == forwards.begin() ||
             has_run(task.stage, TaskKind::kForward, *(place - 1));
    };
    while (!open.empty()) {
      const auto next = std::find_if(open.begin(), open.end(), may_run);
      order.push_back(*next);
      open.erase(next);
    }
    return order;
  }

  // Lognormal, with now and then a stall; some steps have no latency, some tasks no duration.
  void make_times() {
    fifo_links_ = draw(0, 1) == 1;
    const double spread = 0.1 + 0.1 * draw(0, 8);
    const double mean_latency_ns = draw(0, 4) * 2500.0;
    std::lognormal_distribution<double> noise(0.0, spread);
    const auto time_ns = [&](double mean_ns, std::int32_t one_in) {
      const double stall = draw(1, one_in) == 1 ? 12.0 : 1.0;
      return static_cast<std::int64_t>(std::llround(mean_ns * noise(random_) * stall));
    };
    const std::size_t num_tasks = std::size_t{2} * num_ranks_ * num_microbatches_;
    for (std::size_t i = 0; i < num_tasks; ++i) {
      const double mean_ns = i < num_tasks / 2 ? 10000.0 : 20000.0;
      durations_ns_.push_back(draw(1, 60) == 1 ? 0 : time_ns(mean_ns, 40));
      latencies_ns_.push_back(time_ns(mean_latency_ns, 15));
    }
  }

  std::mt19937_64 random_;
  std::int32_t num_ranks_ = 1;
  std::int32_t num_microbatches_ = 1;
  bool fifo_links_ = false;
  StepOptions options_;
  std::vector<std::int64_t> durations_ns_;
  std::vector<std::int64_t> latencies_ns_;
};

}  // namespace rrfp::test
