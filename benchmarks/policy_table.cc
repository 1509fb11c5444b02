// What each policy is worth, simulated with the engine that runs real steps.
//
//   policy_table [--seeds n] [--ranks P --microbatches M] [--no-grid] [--json FILE]
//
// Table 1: speed-up over fixed ZB-H1 (and, for unsplit policies, over fixed 1F1B), the geometric
// mean over the nine variability models of the medians over the seeds. Table 2: durations that do
// not vary, a grid of 240 cases at limit P: how far "auto" is from its own fixed order, with and
// without the guard. Table 3: the same for durations that vary little. The fixed orders run with
// the microbatches as given.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "policy_training.hpp"

using namespace rrfp;
using namespace rrfp::sim;

namespace {

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
    {"ZB-H1, W as filler", "auto", kAutoSlack, true, false, false, true},
    {"auto split", "auto", kAutoSlack, true},
    {"auto split + guard", "auto", kAutoSlack, true, true, true},
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

struct Ratio {
  double forward, input_grad, weight_grad;
};
constexpr Ratio kRatios[] = {{1, 1, 1}, {1, 1.2, 0.8}, {1, 0.8, 0.6}, {1, 1.5, 1}};
constexpr double kLatencies[] = {0.01, 0.05, 0.1, 0.2};

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

// Constant durations: how far the ninth step is ahead of the policy's own fixed order.
double constant_speed_up(Shape shape, const Policy& policy, std::int32_t limit,
                         const Times& times) {
  Training order(shape, policy.split ? kFixedZbH1 : kFixed1F1B, shape.num_ranks, false, false);
  Training training(shape, policy, limit, false, false);
  double ns = 0;
  for (std::size_t step = 0; step <= kGuardSteps; ++step) ns = training.makespan_ns(times);
  return order.makespan_ns(times) / ns;
}

// One row: a policy at one limit. Its cells are by order and link; the last one is for constant
// durations.
std::string speed_up_row(const Draws& draws, Shape shape, const Policy& policy, double limit) {
  const auto units = static_cast<std::int32_t>(limit * shape.num_ranks);
  std::string cells;
  std::printf("%-20s %5.2fP", policy.name, limit);
  for (const bool mid : {false, true}) {
    for (const bool fifo : {true, false}) {
      const auto score = draws.score({shape, policy, units, mid, fifo});
      const std::string text =
          number(score.over_zb_h1) + (policy.split ? "" : " / " + number(score.over_1f1b));
      std::printf(" %16s", text.c_str());
      cells += std::string(", \"") + (mid ? "mid" : "given") + (fifo ? ", links in order" : "") +
               "\": [" + number(score.over_zb_h1) + ", " + number(score.over_1f1b) + "]";
    }
  }
  const Times times = constant_times(kRatios[0], kLatencies[1], shape.num_microbatches);
  const double constant = constant_speed_up(shape, policy, units, times);
  std::printf(" %9.3f\n", constant);
  std::fflush(stdout);
  return std::string("    {\"policy\": \"") + policy.name +
         "\", \"limit_over_ranks\": " + number(limit) + cells +
         ", \"constant durations\": " + number(constant) + "}";
}

std::string speed_up_table(Shape shape, int num_seeds) {
  const Draws draws(shape, num_seeds);
  const double none = static_cast<double>(shape.num_microbatches) / shape.num_ranks;
  std::string rows;
  std::printf("\nP %d, M %d, %d seeds: over fixed ZB-H1 (unsplit: / over fixed 1F1B)\n",
              shape.num_ranks, shape.num_microbatches, num_seeds);
  std::printf("%-20s %6s %16s %16s %16s %16s %9s\n", "policy", "limit", "given fifo", "given",
              "mid fifo", "mid", "constant");
  for (const Policy& policy : kPolicies) {
    for (const double limit : {1.0, 1.25, 1.5, 2.0, none}) {
      if (limit > 1 && (policy.slack == 0 || policy.guarded)) break;  // the limit changes nothing
      rows += (rows.empty() ? "" : ",\n") + speed_up_row(draws, shape, policy, limit);
    }
  }
  return "  {\"ranks\": " + std::to_string(shape.num_ranks) +
         ", \"microbatches\": " + std::to_string(shape.num_microbatches) +
         ", \"seeds\": " + std::to_string(num_seeds) + ", \"speed_ups\": [\n" + rows + "]}";
}

std::string constant_row(const Policy& policy) {
  int num_cases = 0, num_behind = 0;
  double worst = 9, sum_of_logs = 0;
  for (const std::int32_t num_ranks : {2, 4, 8, 16, 32}) {
    for (const std::int32_t per_rank : {1, 2, 4}) {
      for (const double latency : kLatencies) {
        for (const Ratio& ratio : kRatios) {
          const Shape shape{num_ranks, per_rank * num_ranks};
          const Times times = constant_times(ratio, latency, shape.num_microbatches);
          const double speed_up = constant_speed_up(shape, policy, num_ranks, times);
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
    rows += (rows.empty() ? "" : ",\n") + constant_row(policy);
  }
  return "  {\"constant_durations\": [\n" + rows + "]}";
}

// Durations that vary little, as those of equal tasks on real machines do.
std::string small_noise_table(int num_seeds) {
  constexpr Shape kShape{8, 32};
  constexpr double kNoises[] = {0.02, 0.05, 0.1};
  std::printf("\nP 8, M 32, limit P, noise of every task: over the policy's own fixed order\n%20s",
              "");
  for (const double cv : kNoises) std::printf("  iid(%.2f)", cv);
  std::string rows;
  for (const Policy& policy : kPolicies) {
    if (policy.slack == 0) continue;
    rows += std::string(rows.empty() ? "" : ",\n") + "    {\"policy\": \"" + policy.name + "\"";
    std::printf("\n%-20s", policy.name);
    for (const double cv : kNoises) {
      const Policy& fixed = policy.split ? kFixedZbH1 : kFixed1F1B;
      Training order(kShape, fixed, kShape.num_ranks, false, false);
      Training training(kShape, policy, kShape.num_ranks, false, false);
      std::vector<double> ratios;
      for (std::size_t step = 0; step < kGuardSteps + num_seeds; ++step) {
        const StepDraw draw({.name = "iid", .noise_cv = cv}, kShape.num_ranks,
                            kShape.num_microbatches, step + 1);
        const double ns = training.makespan_ns(times_of(draw));
        if (step >= kGuardSteps) ratios.push_back(order.makespan_ns(times_of(draw)) / ns);
      }
      std::printf(" %10s", number(median(ratios)).c_str());
      rows += ", \"iid(" + number(cv) + ")\": " + number(median(ratios));
    }
    rows += "}";
  }
  std::printf("\n");
  return "  {\"small_noise\": [\n" + rows + "]}";
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
  if (has_grid) tables += ",\n" + constant_table() + ",\n" + small_noise_table(num_seeds);
  if (json == nullptr) return 0;
  std::FILE* file = std::fopen(json, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", json);
    return 1;
  }
  std::fprintf(file, "[\n%s\n]\n", tables.c_str());
  return std::fclose(file) == 0 ? 0 : 1;
}
