#include "arbiter/hint_order.hpp"

#include <algorithm>
#include <utility>

#include "arbiter/named_orders.hpp"
#include "base/check.hpp"

namespace rrfp {

namespace {

template <class T>
bool repeats(std::vector<T> values) {
  std::sort(values.begin(), values.end());
  return std::adjacent_find(values.begin(), values.end()) != values.end();
}

}  // namespace

TaskTable::TaskTable(std::vector<std::int32_t> stages, const std::vector<TaskKind>& kinds,
                     std::int32_t num_microbatches)
    : stages_(std::move(stages)),
      num_chunks_(static_cast<std::int32_t>(stages_.size())),
      num_kinds_(static_cast<std::int32_t>(kinds.size())),
      num_microbatches_(num_microbatches) {
  RRFP_CHECK(!stages_.empty(), "a rank has no stage; give every rank at least one");
  RRFP_CHECK(!kinds.empty(), "a step has no kind of task; it needs at least forwards");
  RRFP_CHECK(num_microbatches_ >= 1, "a step has " + std::to_string(num_microbatches_) +
                                         " microbatches; it needs at least 1");
  RRFP_CHECK(!repeats(stages_), "a rank owns the same stage twice; list each stage once");
  RRFP_CHECK(!repeats(kinds), "a kind of task is listed twice; list each kind once");
  slot_of_kind_.fill(-1);
  for (std::size_t slot = 0; slot < kinds.size(); ++slot) {
    kinds_[slot] = kinds[slot];
    slot_of_kind_[static_cast<std::size_t>(kinds[slot])] = static_cast<std::int8_t>(slot);
  }
}

HintOrder::HintOrder(const TaskTable& table, HintRule rule, const std::vector<Task>& order,
                     std::pmr::memory_resource* memory)
    : places_(table.num_tasks(), memory),
      rule_(rule),
      tasks_per_class_(table.num_microbatches()),
      num_tasks_(table.num_tasks()),
      peak_units_(rrfp::peak_units(order)),
      locals_(std::size_t{2} * table.num_tasks(), memory) {
  std::int32_t num_listed = 0;
  std::vector<std::int32_t> counted(table.num_classes(), 0);
  for (const Task& task : order) {
    const std::int32_t local = table.local(task);
    const std::int32_t position = num_listed++;
    RRFP_CHECK(local >= 0,
               "hint order lists " + to_text(task) + " at position " + std::to_string(position) +
                   ", which is no task of this rank in this step of " +
                   std::to_string(table.num_microbatches()) +
                   " microbatches; remove it, or correct its stage, kind or microbatch");
    RRFP_CHECK(position_of(local) < 0,
               "hint order lists task " + to_text(task) + " twice, at positions " +
                   std::to_string(position_of(local)) + " and " + std::to_string(position) +
                   "; each task of the rank must appear exactly once, so remove one of them");
    const std::int32_t task_class = table.class_of(local);
    const std::int32_t index = counted[task_class]++;
    places_[local] = {position, index};
    locals_[task_class * tasks_per_class_ + index] = local;
    locals_[num_tasks_ + position] = local;
  }
  const auto omitted = std::find_if(places_.begin(), places_.end(),
                                    [](const Place& place) { return place.position < 0; });
  if (omitted != places_.end()) {
    const auto local = static_cast<std::int32_t>(omitted - places_.begin());
    throw UserError("hint order omits task " + to_text(table.task(local)) + ": it lists " +
                    std::to_string(num_listed) + " tasks, and this rank has " +
                    std::to_string(num_tasks_) +
                    " in this step; each task of the rank must appear exactly once");
  }
}

}  // namespace rrfp
