// TaskTable and HintOrder.
#include "arbiter/hint_order.hpp"

#include <algorithm>
#include <map>
#include <random>

#include "base/check.hpp"
#include "check.hpp"

namespace rrfp {
namespace {

constexpr TaskKind kF = TaskKind::kForward;
constexpr TaskKind kB = TaskKind::kBackward;
constexpr TaskKind kI = TaskKind::kInputGrad;
constexpr TaskKind kW = TaskKind::kWeightGrad;

std::vector<Task> tasks(const std::string& text) {
  std::vector<Task> order;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    order.push_back(parse_task(text.substr(at, end - at)).value());
    at = end + 1;
  }
  return order;
}

TEST_CASE(locals_number_kind_then_chunk_then_microbatch) {
  const TaskTable table({1, 5}, {kF, kI, kW}, 3);
  CHECK(table.num_tasks() == 18);
  CHECK(table.num_classes() == 6);
  std::int32_t local = 0;
  for (const TaskKind kind : {kF, kI, kW}) {
    for (std::int32_t chunk = 0; chunk < 2; ++chunk) {
      for (std::int32_t m = 0; m < 3; ++m, ++local) {
        const Task task{chunk == 0 ? 1 : 5, kind, m};
        CHECK(table.task(local) == task);
        CHECK(table.local(task) == local);
        CHECK(table.local_in(table.class_of(local), m) == local);
        CHECK(table.microbatch_of(local) == m);
        CHECK(table.kind_of_class(table.class_of(local)) == kind);
        CHECK(table.chunk_of_class(table.class_of(local)) == chunk);
      }
    }
  }
}

TEST_CASE(a_foreign_task_has_no_local) {
  const TaskTable table({1, 5}, {kF, kB}, 3);
  for (const char* text : {"0F0", "2B1", "1I0", "5W2", "1F3"}) {
    CHECK(table.local(parse_task(text).value()) == -1);
  }
  CHECK(table.local({1, kF, -1}) == -1);
}

TEST_CASE(a_table_without_content_is_refused) {
  CHECK_THROWS_WITH(TaskTable({}, {kF}, 1), "no stage");
  CHECK_THROWS_WITH(TaskTable({0}, {}, 1), "no kind");
  CHECK_THROWS_WITH(TaskTable({0}, {kF}, 0), "0 microbatches");
  CHECK_THROWS_WITH(TaskTable({0, 0}, {kF}, 1), "same stage twice");
  CHECK_THROWS_WITH(TaskTable({0}, {kF, kF}, 1), "listed twice");
}

// The words users see: the task, and both positions of a repeated one.
TEST_CASE(an_order_that_repeats_omits_or_invents_is_refused_by_name) {
  const TaskTable table({2}, {kF, kB}, 2);
  const auto build = [&](const char* text) {
    return HintOrder(table, HintRule::kOrder, tasks(text));
  };
  CHECK_THROWS_WITH(build("2F0 2F1 2B0 2F0"), "2F0 twice, at positions 0 and 3");
  CHECK_THROWS_WITH(build("2F0 2F1 2B0 2B1 2B1"), "2B1 twice, at positions 3 and 4");
  CHECK_THROWS_WITH(build("2F0 2F1 2B1"), "omits task 2B0: it lists 3 tasks, and this rank has 4");
  CHECK_THROWS_WITH(build(""), "omits task 2F0");
  CHECK_THROWS_WITH(build("2F0 3F0 2F1 2B0 2B1"), "lists 3F0 at position 1");
  CHECK_THROWS_WITH(build("2F0 2F2 2F1 2B0 2B1"), "step of 2 microbatches");
}

TEST_CASE(positions_and_class_indices_agree_with_the_list) {
  std::mt19937_64 random(test::seed());
  for (int round = 0; round < 100; ++round) {
    const auto num_microbatches = static_cast<std::int32_t>(1 + random() % 70);
    const TaskTable table({3, 7}, {kF, kI, kW}, num_microbatches);
    std::vector<Task> order;
    for (std::int32_t l = 0; l < table.num_tasks(); ++l) order.push_back(table.task(l));
    std::shuffle(order.begin(), order.end(), random);
    const HintOrder hint(table, HintRule::kForwardBackward, order);
    CHECK(hint.rule() == HintRule::kForwardBackward);
    CHECK(hint.num_tasks() == table.num_tasks());
    std::map<std::int32_t, std::int32_t> seen;  // tasks of the class so far
    for (std::int32_t position = 0; position < table.num_tasks(); ++position) {
      const std::int32_t local = hint.local_at(position);
      CHECK(table.task(local) == order[position]);
      CHECK(hint.position_of(local) == position);
      const std::int32_t index = seen[table.class_of(local)]++;
      CHECK(hint.index_in_class(local) == index);
      CHECK(hint.local_in_class(table.class_of(local), index) == local);
    }
  }
}

TEST_CASE(split_orders_hold_a_unit_until_w) {
  const TaskTable table({0}, {kF, kI, kW}, 2);
  const auto peak = [&](const char* text) {
    return HintOrder(table, HintRule::kOrder, tasks(text)).peak_units();
  };
  CHECK(peak("0F0 0I0 0W0 0F1 0I1 0W1") == 1);
  CHECK(peak("0F0 0I0 0F1 0W0 0I1 0W1") == 2);
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
