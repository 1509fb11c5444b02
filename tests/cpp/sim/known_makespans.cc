// The simulated world reproduces makespans that can be worked out by hand.
#include <algorithm>
#include <string>
#include <vector>

#include "check.hpp"
#include "sim/world.hpp"

using namespace rrfp;

namespace {

// Stage s on rank s mod P, or in a V.
std::shared_ptr<const StageGraph> make_graph(std::int32_t num_ranks, std::int32_t num_chunks,
                                             bool is_v = false) {
  std::vector<std::int32_t> ranks;
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  const std::int32_t num_stages = num_ranks * num_chunks;
  for (std::int32_t stage = 0; stage < num_stages; ++stage) {
    ranks.push_back(is_v ? std::min(stage, num_stages - 1 - stage) : stage % num_ranks);
    if (stage > 0) edges.emplace_back(stage - 1, stage);
  }
  return std::make_shared<StageGraph>(num_ranks, ranks, edges, std::vector<std::int32_t>{});
}

// F, I and W take 1, B takes 2.
std::int64_t makespan(std::shared_ptr<const StageGraph> graph, const StepOptions& options,
                      std::int64_t latency_ns = 0) {
  const auto plan = std::make_shared<StepPlan>(std::move(graph), options);
  sim::WorldOptions world;
  world.duration_ns = [](const Task& task) { return task.kind == TaskKind::kBackward ? 2 : 1; };
  world.latency_ns = [=](const Task&, std::int32_t) { return latency_ns; };
  const sim::WorldResult result = sim::simulate(plan, world);
  CHECK(result.finished);
  return result.makespan_ns;
}

std::int64_t makespan(std::int32_t num_ranks, std::int32_t num_microbatches,
                      const std::string& hint, std::int32_t slack, std::int64_t latency_ns = 0,
                      std::vector<std::int32_t> limits = {}, bool split = false) {
  StepOptions options;
  options.num_microbatches = num_microbatches;
  options.hint = hint;
  options.slack = slack;
  options.split_backward = split;
  options.limits = std::move(limits);
  return makespan(make_graph(num_ranks, 1), options, latency_ns);
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

// named_orders.hpp derives it. With fewer microbatches than ranks there is nothing to fill the
// wait for the first gradient with.
TEST_CASE(zb_h1_fills_the_cool_down) {
  for (std::int32_t num_ranks = 1; num_ranks <= 8; ++num_ranks) {
    for (std::int32_t m = num_ranks; m <= 4 * num_ranks; ++m) {
      const std::int64_t textbook = 3 * m + num_ranks - 1;
      CHECK(makespan(num_ranks, m, "zb-h1", 0, 0, {}, true) == textbook);
      // Readiness keeps it where nothing varies; 1F1B with I and W in a row does not reach it.
      CHECK(makespan(num_ranks, m, "zb-h1", kUnlimited, 0, {}, true) == textbook);
      CHECK(makespan(num_ranks, m, "auto", kAutoSlack, 0, {}, true) == textbook);
      CHECK(makespan(num_ranks, m, "1f1b", 0, 0, {}, true) == 3 * m + 2 * (num_ranks - 1));
    }
  }
}

// Interleaving divides 1F1B's bubble of 3 (P - 1) stage times by V; ZB-V has none at all but the
// way of the first forward and what the last microbatches leave.
TEST_CASE(chunks_take_the_textbook_time) {
  for (std::int32_t num_ranks = 2; num_ranks <= 6; ++num_ranks) {
    for (const std::int32_t groups : {2, 3, 4}) {
      StepOptions options;
      options.num_microbatches = groups * num_ranks;
      options.slack = 0;
      options.hint = "interleaved";
      for (const std::int32_t chunks : {1, 2, 3}) {
        CHECK(makespan(make_graph(num_ranks, chunks), options) ==
              3 * (chunks * options.num_microbatches + num_ranks - 1));
      }
      options.hint = "zbv";
      options.split_backward = true;
      const std::int64_t zbv = makespan(make_graph(num_ranks, 2, true), options);
      CHECK(zbv == 6 * options.num_microbatches + num_ranks - 1);
    }
  }
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
