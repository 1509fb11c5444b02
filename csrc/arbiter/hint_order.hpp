// HintOrder: how one rank ranks its tasks in one step.
//
// A hint is a Rule that chooses between kinds, and a total order over the rank's tasks that
// chooses inside a kind, bounds overtaking (slack), and *is* the schedule at slack 0.
// Position 0 is preferred. Immutable once built; shared by arbiter, simulator and reports.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/task.hpp"

namespace rrfp {

enum class HintRule : std::uint8_t {
  kOrder,             // the lowest position, whatever its kind
  kOrderThenWeight,   // F and I by position; W only when neither can run
  kBackwardForward,   // the paper's BF: rounds of one backward, then one forward
  kRoundsByPosition,  // BF's rounds; between chunks the lowest position decides
  kForwardBackward,   // FB: rounds of one forward, then one backward
  kBackwardPriority,  // any backward before any forward
  kForwardPriority,   // any forward before any backward
};

// The tasks of one rank, numbered densely:
//   local = (kind_slot * num_chunks + chunk) * num_microbatches + microbatch
// kind_slot counts the kinds in use (F, B or F, I, W); chunk c is the rank's c-th stage.
class TaskTable {
 public:
  // At least one stage, one kind and one microbatch; no stage and no kind twice.
  TaskTable(std::vector<std::int32_t> stages, std::vector<TaskKind> kinds,
            std::int32_t num_microbatches);

  std::int32_t num_tasks() const { return num_classes() * num_microbatches_; }
  std::int32_t num_chunks() const { return static_cast<std::int32_t>(stages_.size()); }
  std::int32_t num_microbatches() const { return num_microbatches_; }
  std::int32_t num_classes() const {  // kinds x chunks
    return static_cast<std::int32_t>(kinds_.size()) * num_chunks();
  }
  Task task(std::int32_t local) const;
  std::int32_t local(const Task& task) const;  // -1: not a task of this rank
  std::int32_t local_in(std::int32_t task_class, std::int32_t microbatch) const {
    return task_class * num_microbatches_ + microbatch;
  }
  std::int32_t class_of(std::int32_t local) const { return local / num_microbatches_; }
  std::int32_t microbatch_of(std::int32_t local) const { return local % num_microbatches_; }
  TaskKind kind_of_class(std::int32_t task_class) const {
    return kinds_[task_class / num_chunks()];
  }
  std::int32_t chunk_of_class(std::int32_t task_class) const {
    return task_class % num_chunks();
  }

 private:
  std::vector<std::int32_t> stages_;
  std::vector<TaskKind> kinds_;
  std::int32_t num_microbatches_;
};

class HintOrder {
 public:
  // `order` must name each task of the table exactly once; otherwise UserError, which names
  // the task and, for a repeated one, both positions.
  HintOrder(const TaskTable& table, HintRule rule, const std::vector<Task>& order);

  HintRule rule() const { return rule_; }
  std::int32_t num_tasks() const { return static_cast<std::int32_t>(local_at_.size()); }
  std::int32_t local_at(std::int32_t position) const { return local_at_[position]; }
  std::int32_t position_of(std::int32_t local) const { return position_of_[local]; }

  // A task's number in ReadySet: tasks of a class are counted in order of position.
  std::int32_t index_in_class(std::int32_t local) const { return index_in_class_[local]; }
  std::int32_t local_in_class(std::int32_t task_class, std::int32_t index) const {
    return local_in_class_[task_class * tasks_per_class_ + index];
  }

  // The most units in flight at once when the order runs as it stands (taken at F, given back
  // at B or W): what slack 0 needs.
  std::int32_t peak_units() const { return peak_units_; }

 private:
  HintRule rule_;
  std::int32_t tasks_per_class_;
  std::int32_t peak_units_ = 0;
  std::vector<std::int32_t> local_at_;        // by position
  std::vector<std::int32_t> position_of_;     // by local
  std::vector<std::int32_t> index_in_class_;  // by local
  std::vector<std::int32_t> local_in_class_;  // by class and index
};

}  // namespace rrfp
