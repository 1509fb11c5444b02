// The simulated world reproduces makespans that can be worked out by hand.
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"
#include "sim/world.hpp"

using namespace rrfp;

namespace {

// F takes 1, B takes 2.
std::int64_t makespan(std::int32_t num_ranks, std::int32_t num_microbatches,
                      const std::string& hint, std::int32_t slack, std::int64_t latency_ns = 0,
                      std::vector<std::int32_t> limits = {}) {
  std::vector<std::int32_t> ranks(num_ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  for (std::int32_t stage = 1; stage < num_ranks; ++stage) edges.emplace_back(stage - 1, stage);
  StepOptions options;
  options.num_microbatches = num_microbatches;
  options.hint = hint;
  options.slack = slack;
  options.limits = std::move(limits);
  const auto plan = std::make_shared<StepPlan>(
      std::make_shared<StageGraph>(num_ranks, ranks, edges, std::vector<std::int32_t>{}), options);
  sim::WorldOptions world;
  world.duration_ns = [](const Task& task) { return task.kind == TaskKind::kForward ? 1 : 2; };
  world.latency_ns = [=](const Task&, std::int32_t) { return latency_ns; };
  const sim::WorldResult result = sim::simulate(plan, world);
  CHECK(result.finished);
  return result.makespan_ns;
}

}  // namespace

TEST_CASE(fixed_orders_take_the_textbook_time) {
  for (std::int32_t num_ranks = 1; num_ranks <= 8; ++num_ranks) {
    for (const std::int32_t num_microbatches : {1, 2, 3, 7, 8, 24}) {
      const std::int64_t textbook = std::int64_t{3} * (num_microbatches + num_ranks - 1);
      CHECK(makespan(num_ranks, num_microbatches, "1f1b", 0) == textbook);
      CHECK(makespan(num_ranks, num_microbatches, "gpipe", 0) == textbook);
      CHECK(makespan(num_ranks, num_microbatches, "bf", 0) == textbook);
      // Where nothing varies, readiness does not lose against the fixed order.
      CHECK(makespan(num_ranks, num_microbatches, "1f1b", kUnlimited) == textbook);
      CHECK(makespan(num_ranks, num_microbatches, "auto", kUnlimited) == textbook);
    }
  }
}

TEST_CASE(latency_is_paid_once_per_hop_of_the_longest_path) {
  // One microbatch: down and up the chain, every hop once.
  CHECK(makespan(4, 1, "1f1b", 0, 5) == 4 * 3 + 6 * 5);
  CHECK(makespan(1, 4, "1f1b", 0, 5) == 12);  // no message at all
}

TEST_CASE(a_limit_of_one_runs_one_microbatch_at_a_time_on_the_first_rank) {
  CHECK(makespan(3, 4, "bf", kUnlimited, 0, {1, 1, 1}) == 4 * 9);
  CHECK(makespan(3, 4, "1f1b", kUnlimited, 0, {1, 3, 3}) == 4 * 9);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
