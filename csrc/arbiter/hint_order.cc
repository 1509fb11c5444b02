#include "arbiter/hint_order.hpp"

#include <algorithm>
#include <utility>

#include "arbiter/named_orders.hpp"
#include "base/check.hpp"

namespace rrfp {

namespace {

constexpr std::int32_t kNowhere = -1;

template <class T>
bool repeats(std::vector<T> values) {
  std::sort(values.begin(), values.end());
  return std::adjacent_find(values.begin(), values.end()) != values.end();
}

}  // namespace

TaskTable::TaskTable(std::vector<std::int32_t> stages, std::vector<TaskKind> kinds,
                     std::int32_t num_microbatches)
    : stages_(std::move(stages)), kinds_(std::move(kinds)), num_microbatches_(num_microbatches) {
  RRFP_CHECK(!stages_.empty(), "a rank has no stage; give every rank at least one");
  RRFP_CHECK(!kinds_.empty(), "a step has no kind of task; it needs at least forwards");
  RRFP_CHECK(num_microbatches_ >= 1, "a step has " + std::to_string(num_microbatches_) +
                                         " microbatches; it needs at least 1");
  RRFP_CHECK(!repeats(stages_), "a rank owns the same stage twice; list each stage once");
  RRFP_CHECK(!repeats(kinds_), "a kind of task is listed twice; list each kind once");
}

Task TaskTable::task(std::int32_t local) const {
  const std::int32_t task_class = class_of(local);
  return Task{stages_[chunk_of_class(task_class)], kind_of_class(task_class),
              microbatch_of(local)};
}

std::int32_t TaskTable::local(const Task& task) const {
  const auto stage = std::find(stages_.begin(), stages_.end(), task.stage);
  const auto kind = std::find(kinds_.begin(), kinds_.end(), task.kind);
  if (stage == stages_.end() || kind == kinds_.end()) return -1;
  if (task.microbatch < 0 || task.microbatch >= num_microbatches_) return -1;
  const auto chunk = static_cast<std::int32_t>(stage - stages_.begin());
  const auto kind_slot = static_cast<std::int32_t>(kind - kinds_.begin());
  return local_in(kind_slot * num_chunks() + chunk, task.microbatch);
}

HintOrder::HintOrder(const TaskTable& table, HintRule rule, const std::vector<Task>& order)
    : rule_(rule),
      tasks_per_class_(table.num_microbatches()),
      peak_units_(rrfp::peak_units(order)),
      position_of_(table.num_tasks(), kNowhere),
      index_in_class_(table.num_tasks()),
      local_in_class_(table.num_tasks()) {
  local_at_.reserve(table.num_tasks());
  std::vector<std::int32_t> counted(table.num_classes(), 0);
  for (const Task& task : order) {
    const std::int32_t local = table.local(task);
    const std::int32_t position = num_tasks();
    RRFP_CHECK(local >= 0,
               "hint order lists " + to_text(task) + " at position " + std::to_string(position) +
                   ", which is no task of this rank in this step of " +
                   std::to_string(table.num_microbatches()) +
                   " microbatches; remove it, or correct its stage, kind or microbatch");
    RRFP_CHECK(position_of_[local] == kNowhere,
               "hint order lists task " + to_text(task) + " twice, at positions " +
                   std::to_string(position_of_[local]) + " and " + std::to_string(position) +
                   "; each task of the rank must appear exactly once, so remove one of them");
    const std::int32_t task_class = table.class_of(local);
    const std::int32_t index = counted[task_class]++;
    local_at_.push_back(local);
    position_of_[local] = position;
    index_in_class_[local] = index;
    local_in_class_[task_class * tasks_per_class_ + index] = local;
  }
  const auto omitted = std::find(position_of_.begin(), position_of_.end(), kNowhere);
  if (omitted != position_of_.end()) {
    const auto local = static_cast<std::int32_t>(omitted - position_of_.begin());
    throw UserError("hint order omits task " + to_text(table.task(local)) + ": it lists " +
                    std::to_string(num_tasks()) + " tasks, and this rank has " +
                    std::to_string(table.num_tasks()) +
                    " in this step; each task of the rank must appear exactly once");
  }
}

}  // namespace rrfp
