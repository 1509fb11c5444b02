// StepEngine: inputs complete a task once and in any order, and everything else is told apart.
#include "runtime/step_engine.hpp"

#include <string>
#include <vector>

#include "check.hpp"

using namespace rrfp;

namespace {

// Stages 0 and 1 feed stage 2 (rank 2), which feeds 3 and 4, both with a loss.
std::shared_ptr<const StepPlan> crossing(std::int32_t num_microbatches) {
  using Edges = std::vector<std::pair<std::int32_t, std::int32_t>>;
  auto graph = std::make_shared<StageGraph>(5, std::vector<std::int32_t>{0, 1, 2, 3, 4},
                                            Edges{{0, 2}, {1, 2}, {2, 3}, {2, 4}},
                                            std::vector<std::int32_t>{3, 4});
  StepOptions options;
  options.num_microbatches = num_microbatches;
  options.hint = "bf";
  return std::make_shared<StepPlan>(graph, options);
}

Task task(const char* text) { return *parse_task(text); }

int payloads[8];  // only their addresses matter

}  // namespace

TEST_CASE(a_forward_waits_for_every_edge) {
  StepEngine engine(crossing(2), 2);
  CHECK(engine.claim(1).blocked == Blocked::kInput);
  CHECK(engine.deliver(task("2F1"), 1, &payloads[1], 10) == Delivery::kWaiting);
  CHECK(engine.claim(11).local < 0);
  CHECK(engine.deliver(task("2F1"), 0, &payloads[0], 12) == Delivery::kReady);
  const Choice choice = engine.claim(13);
  CHECK(choice.local == engine.table().local(task("2F1")));
  // 2F0 at least stands before it.
  CHECK(choice.overtaken >= 1 && engine.record(choice.local).overtaken == choice.overtaken);
  const auto inputs = engine.take_inputs(choice.local);
  CHECK(inputs.size() == 2 && inputs[0] == &payloads[0] && inputs[1] == &payloads[1]);
  CHECK((engine.take_inputs(choice.local) == std::vector<void*>{nullptr, nullptr}));
  engine.retire(choice.local, 20);
  const TaskRecord& record = engine.record(choice.local);
  CHECK(record.ready_ns == 12 && record.claimed_ns == 13 && record.retired_ns == 20);
}

TEST_CASE(a_backward_waits_for_its_forward_and_every_consumer) {
  StepEngine engine(crossing(1), 2);
  // A gradient cannot come before the forward ran, but the engine must not depend on it.
  CHECK(engine.deliver(task("2B0"), 4, &payloads[4], 1) == Delivery::kWaiting);
  CHECK(engine.deliver(task("2B0"), 3, &payloads[3], 2) == Delivery::kWaiting);
  CHECK(engine.claim(3).local < 0);
  engine.deliver(task("2F0"), 0, &payloads[0], 4);
  engine.deliver(task("2F0"), 1, &payloads[1], 5);
  const Choice forward = engine.claim(6);
  CHECK(engine.claim(7).local < 0);  // claimed is not retired
  engine.retire(forward.local, 8);
  const Choice backward = engine.claim(9);
  CHECK(engine.table().task(backward.local) == task("2B0"));
  CHECK(engine.record(backward.local).ready_ns == 8);
  const auto inputs = engine.take_inputs(backward.local);
  CHECK(inputs.size() == 3 && inputs[0] == nullptr && inputs[1] == &payloads[3] &&
        inputs[2] == &payloads[4]);
  CHECK(!engine.finished());
  engine.retire(backward.local, 10);
  CHECK(engine.finished() && engine.claim(11).blocked == Blocked::kDone);
}

TEST_CASE(a_loss_stage_runs_its_backward_after_its_forward) {
  StepEngine engine(crossing(1), 4);
  CHECK(engine.deliver(task("4F0"), 2, nullptr, 1) == Delivery::kReady);
  engine.retire(engine.claim(2).local, 3);
  CHECK(engine.table().task(engine.claim(4).local) == task("4B0"));
}

TEST_CASE(a_source_is_ready_from_the_start) {
  StepEngine engine(crossing(2), 0);
  const Choice choice = engine.claim(5);
  CHECK(engine.table().task(choice.local) == task("0F0"));
  CHECK(engine.record(choice.local).ready_ns == 0 && engine.take_inputs(choice.local).empty());
}

TEST_CASE(duplicates_and_strangers_change_nothing) {
  StepEngine engine(crossing(1), 2);
  CHECK(engine.deliver(task("2F0"), 0, &payloads[0], 1) == Delivery::kWaiting);
  CHECK(engine.deliver(task("2F0"), 0, &payloads[5], 2) == Delivery::kDuplicate);
  CHECK(engine.deliver(task("2F0"), 3, &payloads[5], 2) == Delivery::kUnknown);  // a consumer
  CHECK(engine.deliver(task("2F1"), 0, &payloads[5], 2) == Delivery::kUnknown);
  CHECK(engine.deliver(task("1F0"), 0, &payloads[5], 2) == Delivery::kUnknown);
  CHECK(engine.deliver(task("2I0"), 3, &payloads[5], 2) == Delivery::kUnknown);
  CHECK(engine.deliver(task("2F0"), 1, &payloads[1], 3) == Delivery::kReady);
  const Choice choice = engine.claim(4);
  CHECK((engine.take_inputs(choice.local) == std::vector<void*>{&payloads[0], &payloads[1]}));
  CHECK(engine.deliver(task("2F0"), 1, &payloads[5], 5) == Delivery::kDuplicate);  // after all
}

TEST_CASE(missing_names_the_first_lacking_input) {
  StepEngine engine(crossing(2), 2);
  engine.deliver(task("2F0"), 0, nullptr, 1);
  const auto missing = engine.missing(2);
  CHECK(missing.size() == 2 && missing[0].task == task("2F0") && missing[0].source_stage == 1);
  CHECK(engine.needs(0) && engine.needs(1) && engine.needs(3) && !engine.needs(2));
  engine.deliver(task("2F0"), 1, nullptr, 1);
  engine.retire(engine.claim(2).local, 3);
  for (const auto& entry : engine.missing(99)) CHECK(!(entry.task == task("2F0")));
  CHECK(engine.missing(99).size() == 3);
  engine.deliver(task("2F1"), 0, nullptr, 4);
  CHECK(!engine.needs(0));  // both its outputs are here; its gradients are for it, not for us
  StepEngine loss(crossing(1), 3);
  loss.deliver(task("3F0"), 2, nullptr, 1);
  const auto last = loss.missing(9);
  CHECK(last.size() == 2 && last[0].source_stage == -1 && last[1].source_stage == -1);
}

TEST_CASE(drain_gives_back_what_nobody_took) {
  StepEngine engine(crossing(2), 2);
  engine.deliver(task("2F0"), 0, &payloads[0], 1);
  engine.deliver(task("2F0"), 1, &payloads[1], 1);
  engine.deliver(task("2F1"), 1, &payloads[2], 1);
  engine.take_inputs(engine.claim(2).local);
  CHECK((engine.drain() == std::vector<void*>{&payloads[2]}));
  CHECK(engine.drain().empty());
}

// Two stages of a chain on one rank: the second one's forward is a local dependent.
TEST_CASE(several_stages_of_one_rank) {
  using Edges = std::vector<std::pair<std::int32_t, std::int32_t>>;
  auto graph = std::make_shared<StageGraph>(1, std::vector<std::int32_t>{0, 0}, Edges{{0, 1}},
                                            std::vector<std::int32_t>{});
  StepOptions options;
  options.num_microbatches = 1;
  options.hint = "order";
  for (const char* text : {"0F0", "1F0", "1B0", "0B0"}) options.order.push_back(task(text));
  StepEngine engine(std::make_shared<StepPlan>(graph, options), 0);
  std::string ran;
  for (std::int64_t now_ns = 1; !engine.finished(); ++now_ns) {
    const Choice choice = engine.claim(now_ns);
    if (choice.local < 0) break;
    const Task done = engine.table().task(choice.local);
    engine.retire(choice.local, now_ns);
    for (const std::int32_t stage : graph->targets_of(done)) {
      CHECK(engine.deliver({stage, done.kind, 0}, done.stage, nullptr, now_ns) ==
            Delivery::kReady);
    }
    ran += to_text(done) + " ";
  }
  CHECK(ran == "0F0 1F0 1B0 0B0 ");
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
