#include "sim/variability.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace rrfp::sim {

namespace {

constexpr double kLatencyUnits = 0.05;
constexpr double kLongest = 16;
constexpr double kTextOnlyShare = 0.15;
constexpr double kTextOnlyWork = 0.05;

double lognormal_of_mean_1(std::mt19937_64& random, double sigma) {
  if (sigma == 0) return 1;
  return std::lognormal_distribution<double>(-sigma * sigma / 2, sigma)(random);
}

double sigma_of(double cv) { return std::sqrt(std::log1p(cv * cv)); }

std::int64_t to_ns(double units) {
  return static_cast<std::int64_t>(std::llround(units * static_cast<double>(kUnitNs)));
}

// Attention's square counts in full for F and I, by half for W; B is I and W.
double work_of(TaskKind kind, double length, double quadratic) {
  const double full = (1 - quadratic) * length + quadratic * length * length;
  const double half = (1 - quadratic) * length + quadratic * length * length / 2;
  switch (kind) {
    case TaskKind::kForward:
    case TaskKind::kInputGrad: return full;
    case TaskKind::kWeightGrad: return half;
    case TaskKind::kBackward: break;
  }
  return full + half;
}

// Lengthens the tasks of one stage and kind now and then.
class Jitter {
 public:
  Jitter(const Variability& model, TaskKind kind)
      : model_(model), strikes_(kind == TaskKind::kWeightGrad ? 0.0 : model.jitter_probability) {}

  double lengthen(double units, std::mt19937_64& random) {
    if (strikes_ == 0) return units;
    std::uniform_real_distribution<double> uniform(0, 1);
    usual_ = usual_ < 0 ? units : 0.9 * usual_ + 0.1 * units;
    if (uniform(random) >= strikes_) return units;
    return units + model_.jitter_alpha * std::max(model_.jitter_base_units, usual_) *
                       (0.5 + uniform(random));
  }

 private:
  const Variability& model_;
  const double strikes_;
  double usual_ = -1;
};

}  // namespace

std::vector<Variability> jitters(double unit_ms) {
  const auto level = [&](const char* name, double probability, double base_ms, double alpha) {
    return Variability{.name = name,
                       .jitter_probability = probability,
                       .jitter_base_units = base_ms / unit_ms,
                       .jitter_alpha = alpha};
  };
  return {level("J1", 0.1, 5, 0.5), level("J2", 0.2, 10, 1.0), level("J3", 0.3, 15, 1.5)};
}

const std::vector<Variability>& scored_variabilities() {
  static const std::vector<Variability> all = {
      {.name = "iid(.3)", .noise_cv = 0.3},
      {.name = "iid(1)", .noise_cv = 1},
      {.name = "len(.5,.2)", .length_sigma = 0.5, .quadratic = 0.2},
      {.name = "len(1,.2)", .length_sigma = 1, .quadratic = 0.2},
      {.name = "mm(1,1,1,.3)", .length_sigma = 0.3, .image_stages = 1, .image_sigma = 1},
      {.name = "mm(2,1,1,.5)", .length_sigma = 0.5, .image_stages = 2, .image_sigma = 1},
      {.name = "stall(.05,2)", .stall_probability = 0.05, .stall_units = 2},
      {.name = "stall(.05,10)", .stall_probability = 0.05, .stall_units = 10},
      {.name = "mix(.7,.2,.02,5)",
       .noise_cv = 0.2,
       .length_sigma = 0.7,
       .quadratic = 0.2,
       .stall_probability = 0.02,
       .stall_units = 5},
  };
  return all;
}

StepDraw::StepDraw(const Variability& model, std::int32_t num_stages,
                   std::int32_t num_microbatches, std::uint64_t seed)
    : num_stages_(num_stages),
      num_microbatches_(num_microbatches),
      durations_ns_(static_cast<std::size_t>(kNumTaskKinds) * num_stages * num_microbatches),
      latencies_ns_(durations_ns_.size()),
      costs_(num_microbatches, 0.0) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<double> lengths(num_microbatches);
  std::vector<double> images(num_microbatches);
  for (std::int32_t m = 0; m < num_microbatches; ++m) {
    lengths[m] = std::min(lognormal_of_mean_1(random, model.length_sigma), kLongest);
    const bool is_text_only = uniform(random) < kTextOnlyShare;
    images[m] = is_text_only ? kTextOnlyWork : lognormal_of_mean_1(random, model.image_sigma);
  }
  std::int32_t first_slow_stage = 0;
  if (model.slow_stages > 0) {
    first_slow_stage = std::uniform_int_distribution<std::int32_t>(0, num_stages - 1)(random);
  }
  for (std::int32_t kind = 0; kind < kNumTaskKinds; ++kind) {
    for (std::int32_t stage = 0; stage < num_stages; ++stage) {
      const double share = share_of_stage(model, stage, first_slow_stage);
      Jitter jitter(model, static_cast<TaskKind>(kind));
      for (std::int32_t m = 0; m < num_microbatches; ++m) {
        const Task task{stage, static_cast<TaskKind>(kind), m};
        const double length = stage < model.image_stages ? images[m] : lengths[m];
        const double work = share * work_of(task.kind, length, model.quadratic);
        const double noise = lognormal_of_mean_1(random, sigma_of(model.noise_cv));
        durations_ns_[index(task)] = to_ns(jitter.lengthen(work * noise, random));
        const bool is_late = uniform(random) < model.stall_probability;
        latencies_ns_[index(task)] = to_ns(kLatencyUnits + (is_late ? model.stall_units : 0));
        if (task.kind != TaskKind::kBackward) costs_[m] += work;
      }
    }
  }
}

double StepDraw::share_of_stage(const Variability& model, std::int32_t stage,
                                std::int32_t first_slow_stage) const {
  const std::int32_t behind = (stage - first_slow_stage + num_stages_) % num_stages_;
  return (stage == num_stages_ - 1 ? 1 + model.last_extra : 1.0) *
         (stage == 0 ? 1 + model.first_extra : 1.0) *
         (behind < model.slow_stages ? model.slow_factor : 1.0);
}

std::vector<std::int32_t> mid_order(const std::vector<double>& costs) {
  std::vector<std::int32_t> by_cost(costs.size());
  std::iota(by_cost.begin(), by_cost.end(), 0);
  std::stable_sort(by_cost.begin(), by_cost.end(),
                   [&](std::int32_t a, std::int32_t b) { return costs[a] < costs[b]; });
  std::vector<std::int32_t> order;
  for (std::size_t at = 0; at < by_cost.size(); at += 2) order.push_back(by_cost[at]);
  const std::size_t ascending = order.size();
  for (std::size_t at = 1; at < by_cost.size(); at += 2) order.push_back(by_cost[at]);
  std::reverse(order.begin() + static_cast<std::ptrdiff_t>(ascending), order.end());
  return order;
}

}  // namespace rrfp::sim
