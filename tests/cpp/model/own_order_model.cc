// No reachable state deadlocks where a user's own order runs with bounded slack, also with several
// stages on a rank: random orders, whatever the order in which messages arrive.
#include <algorithm>
#include <iterator>
#include <memory>
#include <random>

#include "base/check.hpp"
#include "check.hpp"
#include "model/graph_shapes.hpp"
#include "model/graph_world.hpp"
#include "runtime/fixed_order.hpp"
#include "runtime/step_plan.hpp"

namespace rrfp::test {
namespace {

std::shared_ptr<StageGraph> graph_of(const Shape& shape) {
  return std::make_shared<StageGraph>(shape.num_ranks(), shape.rank_of_stage, shape.edges,
                                      std::vector<std::int32_t>{});
}

std::vector<Task> all_tasks(const StageGraph& graph, std::int32_t num_microbatches, bool split) {
  std::vector<TaskKind> kinds{TaskKind::kForward, TaskKind::kBackward};
  if (split) kinds = {TaskKind::kForward, TaskKind::kInputGrad, TaskKind::kWeightGrad};
  std::vector<Task> tasks;
  for (const TaskKind kind : kinds) {
    for (std::int32_t stage = 0; stage < graph.num_stages(); ++stage) {
      for (std::int32_t m = 0; m < num_microbatches; ++m) tasks.push_back({stage, kind, m});
    }
  }
  return tasks;
}

// Some order in which one device could run them all. Lower microbatches are likelier to go first.
std::vector<Task> random_order(const StageGraph& graph, std::int32_t num_microbatches, bool split,
                               std::mt19937& random) {
  std::vector<Task> waiting = all_tasks(graph, num_microbatches, split);
  std::vector<Task> order;
  while (!waiting.empty()) {
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      const auto inputs = inputs_of(graph, waiting[i]);
      const bool is_ready = std::all_of(inputs.begin(), inputs.end(), [&](const Task& input) {
        return std::find(order.begin(), order.end(), input) != order.end();
      });
      if (is_ready) ready.push_back(i);
    }
    std::size_t pick = ready[random() % ready.size()];
    const std::size_t other = ready[random() % ready.size()];
    if (waiting[other].microbatch < waiting[pick].microbatch) pick = other;
    order.push_back(waiting[pick]);
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(pick));
  }
  return order;
}

std::string deadlock_of(const StepPlan& plan, std::int32_t more_units) {
  std::vector<std::int32_t> limits;
  for (std::int32_t rank = 0; rank < plan.graph().num_ranks(); ++rank) {
    limits.push_back(static_cast<std::int32_t>(plan.graph().stages_of(rank).size()) + more_units);
  }
  return GraphWorld<Arbiter>(plan, limits, plan.arbiter_options(0).admission).search().second;
}

StepOptions options_of(std::vector<Task> order, std::int32_t num_microbatches, bool split,
                       std::int32_t slack) {
  StepOptions options;
  options.num_microbatches = num_microbatches;
  options.hint = "order";
  options.order = std::move(order);
  options.split_backward = split;
  options.slack = slack;
  return options;
}

constexpr int kOrdersEach = 60;

TEST_CASE(own_orders_never_deadlock_with_bounded_slack) {
  std::int32_t num_searched = 0, num_refused = 0, num_of_chunks = 0;
  for (const Shape* shape : {&kChainOfTwo, &kChainOfThree, &kChunks, &kLoop, &kV, &kThreeChunks,
                             &kSourcesTogether, &kSourcesApart, &kFoldedDiamond, &kTwoLosses,
                             &kDownwards}) {
    const auto graph = graph_of(*shape);
    std::mt19937 random(20261128);
    for (int draw = 0; draw < kOrdersEach; ++draw) {
      const bool split = draw % 4 == 3 && shape->rank_of_stage.size() < 4;
      const std::int32_t m = shape->rank_of_stage.size() < 4 ? 3 : 2;
      const auto order = random_order(*graph, m, split, random);
      StepOptions options = options_of(order, m, split, draw % 3 + 1);
      options.weight_in_order = draw % 2 == 1;
      std::unique_ptr<StepPlan> plan;
      try {
        plan = std::make_unique<StepPlan>(graph, options);
      } catch (const UserError&) {
        ++num_refused;
        continue;
      }
      num_of_chunks += graph->max_stages_per_rank() > 1;
      for (const std::int32_t more_units : {0, 1, 2}) {
        ++num_searched;
        const std::string deadlock = deadlock_of(*plan, more_units);
        if (deadlock.empty()) continue;
        fail(__FILE__, __LINE__, std::string("deadlock: ") + shape->name + ", draw " +
                                     std::to_string(draw) + " after " + deadlock);
      }
    }
  }
  std::printf("  %d searches, %d orders of several stages a rank, %d refused\n", num_searched,
              num_of_chunks, num_refused);
  CHECK(num_of_chunks >= 150 && num_refused >= 50);
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
