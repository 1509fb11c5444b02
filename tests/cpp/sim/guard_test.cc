// The guard: keeps the rule where that is as good, leaves it where its order is faster, and
// learns from the past alone.
#include "sim/guard.hpp"

#include <numeric>
#include <random>

#include "check.hpp"
#include "sim/variability.hpp"
#include "sim/world.hpp"

using namespace rrfp;
using namespace rrfp::sim;

namespace {

constexpr std::int32_t kRanks = 4;
constexpr std::int32_t kMicrobatches = 12;

std::shared_ptr<const StepPlan> make_plan(bool split, std::int32_t limit, bool waiting = true) {
  std::vector<std::int32_t> ranks(kRanks);
  std::iota(ranks.begin(), ranks.end(), 0);
  StepOptions options;
  options.num_microbatches = kMicrobatches;
  options.split_backward = split;
  options.waiting = waiting;
  options.limits.assign(kRanks, limit);
  return std::make_shared<StepPlan>(
      std::make_shared<StageGraph>(
          kRanks, ranks, std::vector<std::pair<std::int32_t, std::int32_t>>{{0, 1}, {1, 2}, {2, 3}},
          std::vector<std::int32_t>{}),
      options);
}

// What a step with these times leaves behind, whatever ran it.
StepRecord record_of(const StepDraw& draw, bool split) {
  StepRecord record;
  record.num_microbatches = kMicrobatches;
  record.costs = draw.costs();
  for (std::int32_t kind = 0; kind < kNumTaskKinds; ++kind) {
    for (std::int32_t stage = 0; stage < kRanks; ++stage) {
      for (std::int32_t m = 0; m < kMicrobatches; ++m) {
        const Task task{stage, static_cast<TaskKind>(kind), m};
        const bool is_used = task.kind == TaskKind::kForward ||
                             (task.kind != TaskKind::kBackward) == split;
        record.durations_ns.push_back(is_used ? draw.duration_ns(task) : -1);
        record.travels_ns.push_back(is_used ? draw.latency_ns(task) : -1);
      }
    }
  }
  return record;
}

std::vector<StepRecord> past(const Variability& model, bool split, std::size_t num_steps) {
  std::vector<StepRecord> records;
  for (std::size_t step = 0; step < num_steps; ++step) {
    records.push_back(record_of(
        StepDraw(model, kRanks, kMicrobatches, test::seed() + 100 * step), split));
  }
  return records;
}

std::int64_t makespan_ns(std::shared_ptr<const StepPlan> plan, const StepDraw& draw) {
  WorldOptions world;
  world.duration_ns = [&](const Task& task) { return draw.duration_ns(task); };
  world.latency_ns = [&](const Task& from, std::int32_t) { return draw.latency_ns(from); };
  return simulate(std::move(plan), world).makespan_ns;
}

}  // namespace

TEST_CASE(only_a_tight_automatic_step_is_guarded) {
  CHECK(is_guarded(*make_plan(false, 4)) && is_guarded(*make_plan(true, 4)));
  CHECK(!is_guarded(*make_plan(false, 5)) && !is_guarded(*make_plan(true, 8)));
  StepOptions options = make_plan(true, 4)->options();
  options.slack = 3;
  CHECK(!is_guarded(StepPlan(make_plan(true, 4)->shared_graph(), options)));
  CHECK_THROWS_WITH(guard(make_plan(false, 8), {}, {}, 1), "no say in this step");
}

TEST_CASE(the_guard_begins_with_the_ninth_step) {
  const Variability steady{.name = "steady"};
  // Without waiting, the rule is slower than the order when nothing varies.
  const auto plan = make_plan(true, 4, false);
  CHECK(guard(plan, past(steady, true, 7), {}, 1) == GuardChoice::kRule);
  const GuardChoice choice = guard(plan, past(steady, true, 8), {}, 1);
  const StepDraw draw(steady, kRanks, kMicrobatches, 0);
  CHECK(makespan_ns(guarded_plan(plan, choice), draw) <= makespan_ns(plan, draw));
}

// Whatever it chooses must be the best of the three on what it has seen, within the 0.5 %.
TEST_CASE(the_choice_is_never_worse_where_nothing_varies) {
  const Variability steady{.name = "steady"};
  const StepDraw draw(steady, kRanks, kMicrobatches, 0);
  for (const bool split : {false, true}) {
    for (const bool waiting : {false, true}) {
      const auto plan = make_plan(split, 4, waiting);
      const auto chosen = guarded_plan(plan, guard(plan, past(steady, split, 8), {}, 7));
      std::int64_t best_ns = makespan_ns(plan, draw);
      for (const GuardChoice other : {GuardChoice::kFixed, GuardChoice::kSlackTwo}) {
        best_ns = std::min(best_ns, makespan_ns(guarded_plan(plan, other), draw));
      }
      CHECK(static_cast<double>(makespan_ns(chosen, draw)) <=
            1.006 * static_cast<double>(best_ns));
    }
  }
}

TEST_CASE(stalls_keep_the_rule) {
  const Variability stalls{.name = "stalls", .stall_probability = 0.1, .stall_units = 10};
  const auto plan = make_plan(true, 4);
  CHECK(guard(plan, past(stalls, true, 8), {}, 3) == GuardChoice::kRule);
}

TEST_CASE(records_of_another_size_are_refused) {
  auto records = past({.name = "steady"}, true, 8);
  records[3].durations_ns.pop_back();
  CHECK_THROWS_WITH(guard(make_plan(true, 4), records, {}, 1), "one entry per kind");
}

// Durations that follow the costs leave no noise: the choice is that of the coming costs alone.
TEST_CASE(the_same_question_has_the_same_answer) {
  const Variability lengths{.name = "lengths", .length_sigma = 0.7, .quadratic = 0.2};
  const auto plan = make_plan(true, 4);
  const auto records = past(lengths, true, 8);
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const auto costs = StepDraw(lengths, kRanks, kMicrobatches, 900 + seed).costs();
    const GuardChoice first = guard(plan, records, costs, seed);
    CHECK(first == guard(plan, records, costs, seed));
    CHECK(first == guard(plan, records, costs, seed + 1000));  // no noise to draw anew
  }
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
