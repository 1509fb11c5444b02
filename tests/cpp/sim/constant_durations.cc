// Where nothing varies, what does hint "auto" cost against the fixed order it is made from? F, I
// and W take 1, B takes 2, messages .05; one and two stages per rank, split and not. Printed: the
// fixed order's makespan over auto's, with the guard where it has a say and without.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check.hpp"
#include "runtime/hint_policy.hpp"
#include "sim/guard.hpp"
#include "sim/variability.hpp"
#include "sim/world.hpp"

using namespace rrfp;

namespace {

constexpr std::int64_t kUnitNs = 1000;
constexpr std::int64_t kLatencyNs = 50;

struct Family {
  const char* order;
  std::int32_t num_chunks;
  bool is_v;
  bool split;
  double least;            // of fixed / auto without the guard, in any case below
  double least_guarded;
};

constexpr Family kFamilies[] = {
    {"1f1b", 1, false, false, 0.99, 0.995},
    {"interleaved", 2, false, false, 0.995, 0.995},
    {"zb-h1", 1, false, true, 0.99, 0.995},
    {"zbv", 2, true, true, 0.94, 0.99},
};

std::shared_ptr<const StageGraph> graph_of(const Family& family, std::int32_t num_ranks) {
  const std::int32_t num_stages = num_ranks * family.num_chunks;
  std::vector<std::int32_t> ranks;
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  for (std::int32_t stage = 0; stage < num_stages; ++stage) {
    ranks.push_back(family.is_v ? std::min(stage, num_stages - 1 - stage) : stage % num_ranks);
    if (stage > 0) edges.emplace_back(stage - 1, stage);
  }
  return std::make_shared<StageGraph>(num_ranks, ranks, edges, std::vector<std::int32_t>{});
}

std::shared_ptr<const StepPlan> plan_of(const Family& family, std::int32_t num_ranks,
                                        std::int32_t m, const std::string& hint,
                                        std::int32_t slack, std::vector<std::int32_t> limits) {
  StepOptions options;
  options.num_microbatches = m;
  options.hint = hint;
  options.slack = slack;
  options.split_backward = family.split;
  options.limits = std::move(limits);
  return std::make_shared<StepPlan>(graph_of(family, num_ranks), options);
}

std::int64_t duration_ns(const Task& task) {
  return task.kind == TaskKind::kBackward ? 2 * kUnitNs : kUnitNs;
}

// The third of three steps: by then the ranks know what tasks take.
std::int64_t makespan_ns(const std::shared_ptr<const StepPlan>& plan) {
  std::vector<TaskTimes> times;
  for (std::int32_t rank = 0; rank < plan->graph().num_ranks(); ++rank) {
    times.emplace_back(plan->table(rank).num_chunks());
  }
  sim::WorldOptions world;
  world.duration_ns = duration_ns;
  world.latency_ns = [](const Task&, std::int32_t) { return kLatencyNs; };
  world.times = &times;
  std::int64_t last_ns = 0;
  for (int step = 0; step < 3; ++step) {
    const sim::WorldResult result = sim::simulate(plan, world);
    CHECK(result.finished);
    last_ns = result.makespan_ns;
  }
  return last_ns;
}

// What the guard sees of such steps.
sim::StepRecord record_of(const StepPlan& plan) {
  const auto m = static_cast<std::size_t>(plan.num_microbatches());
  const auto stages = static_cast<std::size_t>(plan.graph().num_stages());
  sim::StepRecord record;
  record.num_microbatches = plan.num_microbatches();
  record.durations_ns.assign(kNumTaskKinds * stages * m, -1);
  record.travels_ns.assign(kNumTaskKinds * stages * m, -1);
  for (std::int32_t rank = 0; rank < plan.graph().num_ranks(); ++rank) {
    for (std::int32_t local = 0; local < plan.table(rank).num_tasks(); ++local) {
      const Task task = plan.table(rank).task(local);
      const std::size_t at = (static_cast<std::size_t>(task.kind) * stages + task.stage) * m +
                             task.microbatch;
      record.durations_ns[at] = duration_ns(task);
      for (const std::int32_t target : plan.graph().targets_of(task)) {
        if (plan.graph().rank_of(target) != rank) record.travels_ns[at] = kLatencyNs;
      }
    }
  }
  return record;
}

std::int64_t guarded_ns(const std::shared_ptr<const StepPlan>& plan) {
  if (!sim::is_guarded(*plan)) return makespan_ns(plan);
  const std::vector<sim::StepRecord> records(sim::kGuardSteps, record_of(*plan));
  return makespan_ns(sim::guarded_plan(plan, sim::guard(plan, records, {}, test::seed())));
}

}  // namespace

TEST_CASE(auto_keeps_up_with_fixed_orders_where_nothing_varies) {
  std::printf("  fixed / auto, and with the guard; limits are multiples of the order's peak\n");
  for (const Family& family : kFamilies) {
    double worst = 10, worst_guarded = 10, sum = 0;
    int count = 0;
    for (const std::int32_t num_ranks : {2, 4, 8, 16}) {
      for (const std::int32_t m : {num_ranks, 4 * num_ranks}) {
        std::int32_t peak = 0;
        const auto fixed = plan_of(family, num_ranks, m, family.order, 0, {});
        for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
          peak = std::max(peak, fixed->hint_order(rank).peak_units());
        }
        const auto fixed_ns = static_cast<double>(makespan_ns(fixed));
        std::printf("  %-11s P %2d M %2d:", family.order, num_ranks, m);
        for (const double factor : {1.0, 1.5, 2.0}) {
          const auto units = static_cast<std::int32_t>(std::ceil(factor * peak));
          const std::vector<std::int32_t> limits(num_ranks, units);
          const auto plan = plan_of(family, num_ranks, m, "auto", kAutoSlack, limits);
          const double ratio = fixed_ns / static_cast<double>(makespan_ns(plan));
          const double guarded = fixed_ns / static_cast<double>(guarded_ns(plan));
          std::printf("  %.1f: %.3f %.3f", factor, ratio, guarded);
          worst = std::min(worst, ratio);
          worst_guarded = std::min(worst_guarded, guarded);
          sum += guarded;
          ++count;
        }
        std::printf("\n");
      }
    }
    std::printf("  %s: worst %.3f, with the guard %.3f, mean %.3f\n", family.order, worst,
                worst_guarded, sum / count);
    CHECK(worst >= family.least);
    CHECK(worst_guarded >= family.least_guarded);
  }
}

// A wait that ended at the moment announced would miss half of the gradients by a little, each
// time with a long task just started: .96 and .94 of the fixed order.
TEST_CASE(a_little_noise_costs_little) {
  constexpr std::int32_t kRanks = 8, kMicrobatches = 32;
  for (const Family& family : {kFamilies[0], kFamilies[2]}) {
    const std::vector<std::int32_t> limits(kRanks, kRanks);
    const auto fixed = plan_of(family, kRanks, kMicrobatches, family.order, 0, limits);
    const auto rule = plan_of(family, kRanks, kMicrobatches, "auto", kAutoSlack, limits);
    std::vector<TaskTimes> times(kRanks, TaskTimes(1));
    double fixed_ns = 0, rule_ns = 0;
    for (std::uint64_t step = 0; step < 12; ++step) {
      const sim::StepDraw draw({.name = "noise", .noise_cv = 0.02}, kRanks, kMicrobatches,
                               test::seed() + step);
      sim::WorldOptions world;
      world.duration_ns = [&](const Task& task) { return draw.duration_ns(task); };
      world.latency_ns = [&](const Task& from, std::int32_t) { return draw.latency_ns(from); };
      const auto by_order = sim::simulate(fixed, world);
      world.times = &times;
      const auto by_rule = sim::simulate(rule, world);
      if (step < 2) continue;  // learns
      fixed_ns += static_cast<double>(by_order.makespan_ns);
      rule_ns += static_cast<double>(by_rule.makespan_ns);
    }
    std::printf("  %s: fixed / auto %.3f\n", family.order, fixed_ns / rule_ns);
    CHECK(fixed_ns / rule_ns >= 0.985);
  }
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
