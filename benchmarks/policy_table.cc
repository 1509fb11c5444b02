// What each policy is worth, simulated with the engine that runs real steps.
//
//   policy_table [--seeds n] [--ranks P --microbatches M] [--no-grid] [--json FILE]
//
// Table 1: speed-up over fixed ZB-H1 (and, for unsplit policies, over fixed 1F1B), the geometric
// mean over the nine variability models of the medians over the seeds. Table 2: durations that do
// not vary, a grid of 240 cases at limit P: how far "auto" is from its own fixed order, with and
// without the guard. Both fixed orders run with the microbatches as given.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "sim/guard.hpp"
#include "sim/variability.hpp"
#include "sim/world.hpp"

using namespace rrfp;
using namespace rrfp::sim;

namespace {

struct Policy {
  const char* name;
  const char* hint;
  std::int32_t slack;
  bool split;
  bool waiting = true;
  bool guarded = false;
};

constexpr Policy kFixed1F1B{"fixed 1F1B", "1f1b", 0, false};
constexpr Policy kFixedZbH1{"fixed ZB-H1", "zb-h1", 0, true};
constexpr Policy kPolicies[] = {
    kFixed1F1B,
    {"1F1B slack 2", "1f1b", 2, false},
    {"1F1B as a hint", "1f1b", kUnlimited, false},
    {"bf", "bf", kUnlimited, false},
    {"auto", "auto", kAutoSlack, false},
    {"auto + guard", "auto", kAutoSlack, false, true, true},
    kFixedZbH1,
    {"ZB-H1 slack 2", "zb-h1", 2, true},
    {"ZB-H1 as a hint", "zb-h1", kUnlimited, true},
    {"bfw", "bfw", kUnlimited, true},
    {"auto split, no waiting", "auto", kAutoSlack, true, false},
    {"auto split", "auto", kAutoSlack, true},
    {"auto split + guard", "auto", kAutoSlack, true, true, true},
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

// One policy over the steps of one model: what it has learnt goes on from step to step.
class Training {
 public:
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

  double makespan_ns(const Times& times) {
    std::shared_ptr<const StepPlan> plan = make_plan(times);
    if (policy_.guarded && is_guarded(*plan)) {
      plan = guarded_plan(plan, guard(plan, records_, times.costs, ++num_steps_));
    }
    WorldOptions world;
    world.duration_ns = times.duration_ns;
    world.latency_ns = [&](const Task& from, std::int32_t) { return times.latency_ns(from); };
    world.fifo_links = fifo_;
    world.times = &times_;
    const WorldResult result = simulate(plan, world);
    if (!result.finished) std::abort();
    if (policy_.guarded) remember(times);
    return static_cast<double>(result.makespan_ns);
  }

 private:
  std::shared_ptr<const StepPlan> make_plan(const Times& times) const {
    StepOptions options;
    options.num_microbatches = shape_.num_microbatches;
    options.hint = policy_.hint;
    options.slack = policy_.slack;
    options.split_backward = policy_.split;
    options.waiting = policy_.waiting;
    options.limits.assign(shape_.num_ranks, limit_);
    if (mid_) options.microbatch_order = mid_order(times.costs);
    return std::make_shared<StepPlan>(graph_, options);
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

Times times_of(const StepDraw& draw) {
  return {[&](const Task& task) { return draw.duration_ns(task); },
          [&](const Task& from) { return draw.latency_ns(from); }, draw.costs()};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[values.size() / 2] + values[(values.size() - 1) / 2]) / 2;
}

// The draws of all models, and what the two fixed orders make of them. The first kGuardSteps
// steps of a model are not scored: the guard learns from them.
class Draws {
 public:
  Draws(Shape shape, int num_seeds) : shape_(shape), num_seeds_(num_seeds) {
    for (std::size_t model = 0; model < scored_variabilities().size(); ++model) {
      for (std::size_t step = 0; step < kGuardSteps + num_seeds; ++step) {
        draws_.emplace_back(scored_variabilities()[model], shape.num_ranks,
                            shape.num_microbatches, 1000 * model + step + 1);
      }
    }
    zb_h1_ns_ = makespans({shape, kFixedZbH1, shape.num_ranks, false, false});
    one_f_one_b_ns_ = makespans({shape, kFixed1F1B, shape.num_ranks, false, false});
  }

  struct Score {
    double over_zb_h1 = 0;
    double over_1f1b = 0;
  };
  Score score(const Training& fresh) const {
    const std::vector<double> ns = makespans(fresh);
    return {mean_of_medians(zb_h1_ns_, ns), mean_of_medians(one_f_one_b_ns_, ns)};
  }

 private:
  std::vector<double> makespans(const Training& fresh) const {
    std::vector<double> ns;
    const std::size_t steps_per_model = kGuardSteps + num_seeds_;
    for (std::size_t at = 0; at < draws_.size(); at += steps_per_model) {
      Training training = fresh;
      for (std::size_t step = 0; step < steps_per_model; ++step) {
        const double makespan_ns = training.makespan_ns(times_of(draws_[at + step]));
        if (step >= kGuardSteps) ns.push_back(makespan_ns);
      }
    }
    return ns;
  }

  double mean_of_medians(const std::vector<double>& base_ns, const std::vector<double>& ns) const {
    double sum_of_logs = 0;
    for (std::size_t at = 0; at < ns.size(); at += num_seeds_) {
      std::vector<double> ratios;
      for (int i = 0; i < num_seeds_; ++i) ratios.push_back(base_ns[at + i] / ns[at + i]);
      sum_of_logs += std::log(median(ratios));
    }
    return std::exp(sum_of_logs / static_cast<double>(ns.size() / num_seeds_));
  }

  Shape shape_;
  int num_seeds_;
  std::vector<StepDraw> draws_;  // model by model
  std::vector<double> zb_h1_ns_;
  std::vector<double> one_f_one_b_ns_;
};

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", value);
  return text;
}

std::string speed_up_table(Shape shape, int num_seeds) {
  const Draws draws(shape, num_seeds);
  std::string rows;
  std::printf("\nP %d, M %d, %d seeds: over fixed ZB-H1 (unsplit: / over fixed 1F1B)\n",
              shape.num_ranks, shape.num_microbatches, num_seeds);
  std::printf("%-24s %6s %16s %16s %16s %16s\n", "policy", "limit", "given fifo", "given",
              "mid fifo", "mid");
  for (const Policy& policy : kPolicies) {
    for (const double limit : {1.0, 1.25, 1.5, 2.0}) {
      if (limit > 1 && (policy.slack == 0 || policy.guarded)) break;  // the limit changes nothing
      std::printf("%-24s %5.2fP", policy.name, limit);
      for (const bool mid : {false, true}) {
        for (const bool fifo : {true, false}) {
          const auto units = static_cast<std::int32_t>(limit * shape.num_ranks);
          const auto score = draws.score({shape, policy, units, mid, fifo});
          const std::string text =
              number(score.over_zb_h1) + (policy.split ? "" : " / " + number(score.over_1f1b));
          std::printf(" %16s", text.c_str());
          rows += std::string(rows.empty() ? "" : ",\n") + "    {\"policy\": \"" + policy.name +
                  "\", \"limit_over_ranks\": " + number(limit) +
                  ", \"order\": \"" + (mid ? "mid" : "given") +
                  "\", \"fifo\": " + (fifo ? "true" : "false") +
                  ", \"over_zb_h1\": " + number(score.over_zb_h1) +
                  ", \"over_1f1b\": " + number(score.over_1f1b) + "}";
        }
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return "  {\"ranks\": " + std::to_string(shape.num_ranks) +
         ", \"microbatches\": " + std::to_string(shape.num_microbatches) +
         ", \"seeds\": " + std::to_string(num_seeds) + ", \"speed_ups\": [\n" + rows + "]}";
}

struct Ratio {
  double forward, input_grad, weight_grad;
};
constexpr Ratio kRatios[] = {{1, 1, 1}, {1, 1.2, 0.8}, {1, 0.8, 0.6}, {1, 1.5, 1}};

Times constant_times(const Ratio& ratio, double latency, std::int32_t num_microbatches) {
  const auto units = [](double value) {
    return static_cast<std::int64_t>(std::llround(value * static_cast<double>(kUnitNs)));
  };
  return {[=](const Task& task) {
            switch (task.kind) {
              case TaskKind::kForward: return units(ratio.forward);
              case TaskKind::kInputGrad: return units(ratio.input_grad);
              case TaskKind::kWeightGrad: return units(ratio.weight_grad);
              case TaskKind::kBackward: break;
            }
            return units(ratio.input_grad + ratio.weight_grad);
          },
          [=](const Task&) { return units(latency); },
          std::vector<double>(num_microbatches, 1.0)};
}

// Durations that do not vary: the ninth step of each case, over that of the fixed order.
std::string constant_row(const Policy& policy, const Policy& fixed) {
  int num_cases = 0, num_behind = 0;
  double worst = 9, sum_of_logs = 0;
  for (const std::int32_t num_ranks : {2, 4, 8, 16, 32}) {
    for (const std::int32_t per_rank : {1, 2, 4}) {
      for (const double latency : {0.01, 0.05, 0.1, 0.2}) {
        for (const Ratio& ratio : kRatios) {
          const Shape shape{num_ranks, per_rank * num_ranks};
          const Times times = constant_times(ratio, latency, shape.num_microbatches);
          Training order(shape, fixed, num_ranks, false, false);
          Training training(shape, policy, num_ranks, false, false);
          double ns = 0;
          for (std::size_t step = 0; step <= kGuardSteps; ++step) ns = training.makespan_ns(times);
          const double speed_up = order.makespan_ns(times) / ns;
          ++num_cases;
          if (speed_up < 0.99) ++num_behind;
          worst = std::min(worst, speed_up);
          sum_of_logs += std::log(speed_up);
        }
      }
    }
  }
  const double mean = std::exp(sum_of_logs / num_cases);
  std::printf("%-24s %6d %18.1f%% %8.3f %8.3f\n", policy.name, num_cases,
              100.0 * num_behind / num_cases, worst, mean);
  std::fflush(stdout);
  return std::string("    {\"policy\": \"") + policy.name +
         "\", \"cases\": " + std::to_string(num_cases) +
         ", \"behind_by_over_1_percent\": " + std::to_string(num_behind) +
         ", \"worst\": " + number(worst) + ", \"mean\": " + number(mean) + "}";
}

std::string constant_table() {
  std::printf("\nconstant durations, limit P: over the policy's own fixed order\n");
  std::printf("%-24s %6s %19s %8s %8s\n", "policy", "cases", "over 1 % behind", "worst", "mean");
  std::string rows;
  for (const Policy& policy : kPolicies) {
    if (policy.slack == 0) continue;
    rows += (rows.empty() ? "" : ",\n") +
            constant_row(policy, policy.split ? kFixedZbH1 : kFixed1F1B);
  }
  return "  {\"constant_durations\": [\n" + rows + "]}";
}

}  // namespace

int main(int argc, char** argv) {
  int num_seeds = 24;
  std::vector<Shape> shapes = {{8, 32}, {16, 64}, {4, 16}};
  bool has_grid = true;
  const char* json = nullptr;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (std::strcmp(argv[i], "--no-grid") == 0) {
      has_grid = false;
    } else if (std::strcmp(argv[i], "--seeds") == 0 && has_value) {
      num_seeds = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--ranks") == 0 && has_value) {
      shapes.resize(1);
      shapes[0].num_ranks = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--microbatches") == 0 && has_value) {
      shapes.resize(1);
      shapes[0].num_microbatches = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--json") == 0 && has_value) {
      json = argv[++i];
    } else {
      std::fprintf(stderr, "usage: policy_table [--seeds n] [--ranks P --microbatches M] "
                           "[--no-grid] [--json FILE]\n");
      return 2;
    }
  }
  std::string tables;
  for (const Shape shape : shapes) {
    tables += (tables.empty() ? "" : ",\n") + speed_up_table(shape, num_seeds);
  }
  if (has_grid) tables += ",\n" + constant_table();
  if (json == nullptr) return 0;
  std::FILE* file = std::fopen(json, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", json);
    return 1;
  }
  std::fprintf(file, "[\n%s\n]\n", tables.c_str());
  return std::fclose(file) == 0 ? 0 : 1;
}
