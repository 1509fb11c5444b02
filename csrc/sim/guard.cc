#include "sim/guard.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>

#include "base/check.hpp"
#include "runtime/hint_policy.hpp"
#include "sim/world.hpp"

namespace rrfp::sim {

namespace {

constexpr double kWorthLeaving = 0.995;  // of the rule's makespan

// a + b x + c x^2 by least squares. What the values of x cannot tell apart stays zero.
class Quadratic {
 public:
  void add(double x, double y) {
    double power = 1;
    for (int i = 0; i < 5; ++i, power *= x) {
      moments_[i] += power;
      if (i < 3) products_[i] += power * y;
    }
  }

  // Gaussian elimination on the normal equations; a pivot that is nothing but rounding means
  // that this power of x adds nothing.
  void fit() {
    std::array<std::array<double, 4>, 3> rows{};
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 3; ++j) rows[i][j] = moments_[i + j];
      rows[i][3] = products_[i];
    }
    std::array<bool, 3> is_used{};
    for (int i = 0; i < 3; ++i) {
      is_used[i] = rows[i][i] > 1e-9 * moments_[2 * i];
      for (int below = i + 1; is_used[i] && below < 3; ++below) {
        const double factor = rows[below][i] / rows[i][i];
        for (int j = i; j < 4; ++j) rows[below][j] -= factor * rows[i][j];
      }
    }
    for (int i = 2; i >= 0; --i) {
      if (!is_used[i]) continue;
      double rest = rows[i][3];
      for (int j = i + 1; j < 3; ++j) rest -= rows[i][j] * coefficients_[j];
      coefficients_[i] = rest / rows[i][i];
    }
  }

  double at(double x) const {
    return coefficients_[0] + x * (coefficients_[1] + x * coefficients_[2]);
  }

 private:
  std::array<double, 5> moments_{};
  std::array<double, 3> products_{};
  std::array<double, 3> coefficients_{};
};

class Lessons {
 public:
  Lessons(std::int32_t num_stages, const std::vector<StepRecord>& steps)
      : means_(static_cast<std::size_t>(kNumTaskKinds) * num_stages) {
    for (const StepRecord& step : steps) {
      for_each_task(step, [&](std::size_t of, double cost, std::size_t index) {
        means_[of].add(cost, static_cast<double>(step.durations_ns[index]));
        if (step.travels_ns[index] >= 0) travels_ns_.push_back(step.travels_ns[index]);
      });
    }
    for (Quadratic& mean : means_) mean.fit();
    for (const StepRecord& step : steps) {
      for_each_task(step, [&](std::size_t of, double cost, std::size_t index) {
        noise_.push_back(static_cast<double>(step.durations_ns[index]) /
                         std::max(means_[of].at(cost), 1.0));
      });
    }
    if (travels_ns_.empty()) travels_ns_.push_back(0);
    if (noise_.empty()) noise_.push_back(1);
  }

  // A step that might come: durations by kind, stage and microbatch, and travels alike.
  StepRecord draw(std::int32_t num_microbatches, const std::vector<double>& costs,
                  std::mt19937_64& random) const {
    StepRecord scenario;
    scenario.num_microbatches = num_microbatches;
    for (const Quadratic& mean : means_) {
      for (std::int32_t m = 0; m < num_microbatches; ++m) {
        const double usual_ns = std::max(mean.at(costs.empty() ? 0 : costs[m]), 0.0);
        scenario.durations_ns.push_back(std::llround(usual_ns * any_of(noise_, random)));
        scenario.travels_ns.push_back(any_of(travels_ns_, random));
      }
    }
    return scenario;
  }

 private:
  template <class T>
  static T any_of(const std::vector<T>& values, std::mt19937_64& random) {
    return values[std::uniform_int_distribution<std::size_t>(0, values.size() - 1)(random)];
  }

  // Calls with kind and stage as one number, the microbatch's cost and the index of the task.
  template <class Call>
  void for_each_task(const StepRecord& step, const Call& call) const {
    const std::size_t num_entries = means_.size() * step.num_microbatches;
    RRFP_CHECK(step.durations_ns.size() == num_entries && step.travels_ns.size() == num_entries,
               "a record of a step needs one entry per kind, stage and microbatch");
    for (std::size_t index = 0; index < num_entries; ++index) {
      if (step.durations_ns[index] < 0) continue;
      const double cost = step.costs.empty() ? 0 : step.costs[index % step.num_microbatches];
      call(index / step.num_microbatches, cost, index);
    }
  }

  std::vector<Quadratic> means_;  // by kind and stage
  std::vector<double> noise_;
  std::vector<std::int64_t> travels_ns_;
};

double mean_makespan_ns(const std::shared_ptr<const StepPlan>& plan,
                        const std::vector<StepRecord>& scenarios) {
  std::vector<TaskTimes> times;
  for (std::int32_t rank = 0; rank < plan->graph().num_ranks(); ++rank) {
    times.emplace_back(plan->table(rank).num_chunks());
  }
  double sum_ns = 0;
  for (const StepRecord& scenario : scenarios) {
    const auto index = [&](const Task& task) {
      return (static_cast<std::size_t>(task.kind) * plan->graph().num_stages() + task.stage) *
                 scenario.num_microbatches + task.microbatch;
    };
    WorldOptions world;
    world.duration_ns = [&](const Task& task) { return scenario.durations_ns[index(task)]; };
    world.latency_ns = [&](const Task& from, std::int32_t) {
      return scenario.travels_ns[index(from)];
    };
    world.times = &times;
    sum_ns += static_cast<double>(simulate(plan, world).makespan_ns);
  }
  return sum_ns / static_cast<double>(scenarios.size());
}

// Whether the limits allow the order of the plan as it stands.
bool fits_fixed(const StepPlan& plan) {
  for (std::int32_t rank = 0; rank < plan.graph().num_ranks(); ++rank) {
    if (plan.hint_order(rank).peak_units() > plan.limit_units(rank)) return false;
  }
  return true;
}

}  // namespace

bool is_guarded(const StepPlan& plan) { return !plan.guarded_order().empty(); }

std::shared_ptr<const StepPlan> guarded_plan(std::shared_ptr<const StepPlan> plan,
                                             GuardChoice choice) {
  if (choice == GuardChoice::kRule) return plan;
  StepOptions options = plan->options();
  options.hint = plan->guarded_order();
  options.slack = choice == GuardChoice::kFixed ? 0 : 2;
  return std::make_shared<StepPlan>(plan->shared_graph(), std::move(options));
}

GuardChoice guard(std::shared_ptr<const StepPlan> plan, const std::vector<StepRecord>& last_steps,
                  const std::vector<double>& costs, std::uint64_t seed) {
  RRFP_CHECK(is_guarded(*plan), "the guard has no say in this step: its hint or slack is not auto, "
                                "or its limit leaves room");
  if (last_steps.size() < kGuardSteps) return GuardChoice::kRule;
  std::mt19937_64 random(seed);
  const Lessons lessons(plan->graph().num_stages(), last_steps);
  std::vector<StepRecord> scenarios;
  for (int i = 0; i < kNumScenarios; ++i) {
    scenarios.push_back(lessons.draw(plan->num_microbatches(), costs, random));
  }
  GuardChoice best = GuardChoice::kRule;
  double best_ns = kWorthLeaving * mean_makespan_ns(plan, scenarios);
  const auto consider = [&](GuardChoice choice) {
    const double makespan_ns = mean_makespan_ns(guarded_plan(plan, choice), scenarios);
    if (makespan_ns < best_ns) best = choice, best_ns = makespan_ns;
  };
  if (fits_fixed(*guarded_plan(plan, GuardChoice::kSlackTwo))) consider(GuardChoice::kFixed);
  consider(GuardChoice::kSlackTwo);
  return best;
}

}  // namespace rrfp::sim
