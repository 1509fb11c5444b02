// RandomStep: one seeded step of the simulated world: stages and their ranks, options, durations,
// latencies, and what goes wrong with its messages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "random_variability.hpp"
#include "runtime/step_plan.hpp"
#include "sim/world.hpp"

namespace rrfp::test {

// The largest world that may be drawn: how a failure is shrunk, and kept small.
struct WorldCaps {
  std::int32_t num_ranks = 8;
  std::int32_t num_microbatches = 20;
};

class RandomStep {
 public:
  explicit RandomStep(std::uint64_t seed, WorldCaps caps = {}) : random_(seed) {
    num_chunks_ = draw(0, 2) == 0 ? draw(2, 3) : 1;
    num_ranks_ = std::min(draw(1, num_chunks_ == 1 ? 8 : 5), caps.num_ranks);
    is_v_ = num_chunks_ == 2 && draw(0, 1) == 1;
    num_microbatches_ = std::min(draw(1, num_chunks_ == 1 ? 20 : 10), caps.num_microbatches);
    is_split_ = draw(0, 1) == 1;
    make_options();
    make_times();
    if (seed % 2 == 1) make_times_of_model(seed);
  }

  const StepOptions& options() const { return options_; }
  std::int32_t num_ranks() const { return num_ranks_; }
  std::int32_t num_chunks() const { return num_chunks_; }
  std::int32_t num_stages() const { return num_ranks_ * num_chunks_; }
  std::int32_t num_microbatches() const { return num_microbatches_; }
  bool fifo_links() const { return fifo_links_; }
  std::int32_t rank_of(std::int32_t stage) const {
    return is_v_ ? std::min(stage, num_stages() - 1 - stage) : stage % num_ranks_;
  }
  std::int32_t chunk_of(std::int32_t stage) const { return stage / num_ranks_; }
  std::vector<TaskKind> kinds() const {
    if (!is_split_) return {TaskKind::kForward, TaskKind::kBackward};
    return {TaskKind::kForward, TaskKind::kInputGrad, TaskKind::kWeightGrad};
  }

  // Tasks numbered by kind (as TaskKind counts), stage and microbatch, used by the step or not.
  std::size_t num_tasks() const {
    return std::size_t{kNumTaskKinds} * num_stages() * num_microbatches_;
  }
  std::size_t index(const Task& task) const {
    return (static_cast<std::size_t>(task.kind) * num_stages() + task.stage) * num_microbatches_ +
           task.microbatch;
  }

  std::shared_ptr<const StepPlan> plan() const { return plan_with(options_); }
  std::shared_ptr<const StepPlan> plan_with(const StepOptions& options) const {
    std::vector<std::int32_t> ranks;
    std::vector<std::pair<std::int32_t, std::int32_t>> edges;
    for (std::int32_t stage = 0; stage < num_stages(); ++stage) {
      ranks.push_back(rank_of(stage));
      if (stage > 0) edges.emplace_back(stage - 1, stage);
    }
    return std::make_shared<StepPlan>(
        std::make_shared<StageGraph>(num_ranks_, ranks, edges, std::vector<std::int32_t>{}),
        options);
  }

  std::int64_t duration_ns(const Task& task) const { return durations_ns_[index(task)]; }
  std::int64_t slowest_ns() const { return *std::ranges::max_element(durations_ns_); }
  std::int64_t latency_ns(const Task& from) const { return latencies_ns_[index(from)]; }
  // How long after its arrival the message comes again; -1: it does not.
  std::int64_t again_after_ns(const Task& from) const { return again_after_ns_[index(from)]; }
  std::int64_t announcement_lag_ns() const { return announcement_lag_ns_; }
  // What its durations and latencies are made of; empty: noise of their own.
  const std::vector<std::string>& variability() const { return variability_; }

  std::string text() const {
    std::string limits;
    for (const std::int32_t limit : options_.limits) limits += std::to_string(limit) + " ";
    for (const std::int64_t limit : options_.limits_bytes) limits += std::to_string(limit) + " B ";
    return std::to_string(num_ranks_) + " ranks, " + std::to_string(num_chunks_) + " chunks" +
           (is_v_ ? " in a V, " : ", ") + std::to_string(num_microbatches_) +
           " microbatches, hint " + options_.hint + (is_split_ ? " split" : "") +
           (options_.weight_in_order ? " in order" : "") +
           (options_.waiting ? " waiting" : "") + ", slack " + std::to_string(options_.slack) +
           ", limits " + limits + (fifo_links_ ? "fifo" : "reordering");
  }

 private:
  std::int32_t draw(std::int32_t least, std::int32_t most) {
    return std::uniform_int_distribution<std::int32_t>(least, most)(random_);
  }
  template <class T>
  T any_of(const std::vector<T>& values) {
    return values[draw(0, static_cast<std::int32_t>(values.size()) - 1)];
  }

  std::vector<std::int32_t> permutation() {
    std::vector<std::int32_t> order(num_microbatches_);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }

  void make_options() {
    std::vector<std::string> hints{"gpipe", "bf", "fb", "auto", "auto", "b-priority", "f-priority",
                                   "order"};
    if (num_chunks_ == 1) hints.insert(hints.end(), {"1f1b", "1f1b"});
    if (!is_v_) hints.push_back("interleaved");
    if (is_split_) hints.push_back("bfw");
    if (is_split_ && num_chunks_ == 1) hints.insert(hints.end(), {"zb-h1", "zb-h1"});
    if (is_split_ && is_v_) hints.insert(hints.end(), {"zbv", "zbv"});
    options_.hint = any_of(hints);
    options_.slack = any_of<std::int32_t>({0, 1, 3, kUnlimited, kUnlimited, kAutoSlack});
    options_.num_microbatches = num_microbatches_;
    options_.split_backward = is_split_;
    options_.waiting = draw(0, 1) == 1;
    options_.weight_in_order = options_.hint != "order" && draw(0, 3) == 0;
    if (options_.hint == "order") {
      if (num_chunks_ > 1 && options_.slack > 0) options_.slack = kUnlimited;
      options_.order = own_order();
    } else if (draw(0, 1) == 1) {
      options_.microbatch_order = permutation();
    }
    if (options_.slack != 0 && draw(0, 4) == 0) return limit_bytes();
    if (draw(0, 3) == 0) return;  // the default limits
    // A fixed order cannot do with less than its peak.
    const auto fixed = options_.slack == 0 ? plan() : nullptr;
    for (std::int32_t rank = 0; rank < num_ranks_; ++rank) {
      const std::int32_t least =
          std::max(fixed ? fixed->limit_units(rank) : num_chunks_, num_chunks_);
      options_.limits.push_back(draw(least, std::max(least, 2 * num_ranks_ * num_chunks_)));
    }
  }

  // From limits that no microbatch fits into up to such as hold back nothing.
  void limit_bytes() {
    std::vector<std::int64_t> total(num_ranks_, 0);
    for (std::int32_t stage = 0; stage < num_stages(); ++stage) {
      auto& sizes = options_.activation_bytes.emplace_back();
      for (std::int32_t m = 0; m < num_microbatches_; ++m) sizes.push_back(draw(0, 100));
      for (const std::int64_t bytes : sizes) total[rank_of(stage)] += bytes;
    }
    for (const std::int64_t bytes : total) {
      options_.limits_bytes.push_back(draw(0, static_cast<std::int32_t>(bytes)));
    }
  }

  // Tasks in an order that can run (unlimited slack: in any order at all); with bounded slack
  // the forwards of all stages in one order of microbatches.
  std::vector<Task> own_order() {
    const std::vector<std::int32_t> forwards = permutation();
    std::vector<Task> order, open;
    for (std::int32_t stage = 0; stage < num_stages(); ++stage) {
      for (const TaskKind kind : kinds()) {
        for (std::int32_t m = 0; m < num_microbatches_; ++m) open.push_back({stage, kind, m});
      }
    }
    std::shuffle(open.begin(), open.end(), random_);
    if (options_.slack < 0) return open;
    std::vector<bool> has_run(num_tasks());
    const auto ran = [&](std::int32_t stage, TaskKind kind, std::int32_t m) {
      return has_run[index({stage, kind, m})];
    };
    const auto may_run = [&](const Task& task) {
      const auto [stage, kind, m] = task;
      if (kind == TaskKind::kWeightGrad) return bool(ran(stage, TaskKind::kInputGrad, m));
      if (kind != TaskKind::kForward) {
        return ran(stage, TaskKind::kForward, m) &&
               (stage == num_stages() - 1 || ran(stage + 1, kind, m));
      }
      if (stage > 0 && !ran(stage - 1, kind, m)) return false;
      const auto place = std::find(forwards.begin(), forwards.end(), m);
      return options_.slack == 0 || place == forwards.begin() ||
             ran(stage, kind, *std::prev(place));
    };
    while (!open.empty()) {
      const auto next = std::find_if(open.begin(), open.end(), may_run);
      has_run[index(*next)] = true;
      order.push_back(*next);
      open.erase(next);
    }
    return order;
  }

  // Lognormal, with now and then a stall; some steps have no latency, some tasks no duration,
  // some messages come twice.
  void make_times() {
    fifo_links_ = draw(0, 1) == 1;
    const double spread = 0.1 * draw(0, 9);
    const double mean_latency_ns = draw(0, 4) * 2500.0;
    const bool has_stalls = draw(0, 3) != 0;
    const std::int32_t one_in_twice = draw(0, 1) == 0 ? 40 : 1000000;
    std::lognormal_distribution<double> noise(0.0, spread + 1e-9);
    const auto time_ns = [&](double mean_ns, std::int32_t one_in) {
      const double stall = has_stalls && draw(1, one_in) == 1 ? 12.0 : 1.0;
      return static_cast<std::int64_t>(std::llround(mean_ns * noise(random_) * stall));
    };
    for (std::size_t i = 0; i < num_tasks(); ++i) {
      const bool is_full = i * kNumTaskKinds / num_tasks() ==
                           static_cast<std::size_t>(TaskKind::kBackward);
      const double mean_ns = is_full ? 20000.0 : 10000.0;
      durations_ns_.push_back(draw(1, 60) == 1 ? 0 : time_ns(mean_ns, 40));
      latencies_ns_.push_back(time_ns(mean_latency_ns, 15));
      again_after_ns_.push_back(draw(1, one_in_twice) == 1 ? draw(0, 50000) : -1);
    }
    announcement_lag_ns_ = draw(0, 2) * 2000;
  }

  // Times of a variability model in the place of those above; what takes no time still does not.
  void make_times_of_model(std::uint64_t seed) {
    const sim::Variability model = random_variability(seed, num_stages());
    const sim::StepDraw times(model, num_stages(), num_microbatches_, seed);
    for (const TaskKind kind : {TaskKind::kForward, TaskKind::kBackward, TaskKind::kInputGrad,
                                TaskKind::kWeightGrad}) {
      for (std::int32_t at = 0; at < num_stages() * num_microbatches_; ++at) {
        const Task task{at / num_microbatches_, kind, at % num_microbatches_};
        std::int64_t& duration_ns = durations_ns_[index(task)];
        if (duration_ns != 0) duration_ns = times.duration_ns(task) / 100;
        latencies_ns_[index(task)] = times.latency_ns(task) / 100;
      }
    }
    variability_ = parts_of(model);
  }

  std::mt19937_64 random_;
  std::int32_t num_ranks_ = 1;
  std::int32_t num_chunks_ = 1;
  std::int32_t num_microbatches_ = 1;
  bool is_v_ = false;
  bool is_split_ = false;
  bool fifo_links_ = false;
  StepOptions options_;
  std::vector<std::int64_t> durations_ns_;
  std::vector<std::int64_t> latencies_ns_;
  std::vector<std::int64_t> again_after_ns_;
  std::int64_t announcement_lag_ns_ = 0;
  std::vector<std::string> variability_;
};

}  // namespace rrfp::test
