// HintOrder: how one rank ranks its tasks in one step.
//
// A hint is a Rule that chooses between kinds, and a total order over the rank's tasks that
// chooses inside a kind, bounds overtaking (slack), and *is* the schedule at slack 0.
// Position 0 is preferred. Immutable once built; shared by arbiter, simulator and reports.
#pragma once

#include <array>
#include <cstdint>
#include <memory_resource>
#include <string>
#include <vector>

#include "base/cache_line.hpp"
#include "base/prefetch.hpp"
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
// A cache line, and its stages.
class alignas(kCacheLineBytes) TaskTable {
 public:
  // At least one stage, one kind and one microbatch; no stage and no kind twice.
  TaskTable(std::vector<std::int32_t> stages, const std::vector<TaskKind>& kinds,
            std::int32_t num_microbatches);

  std::int32_t num_tasks() const { return num_classes() * num_microbatches_; }
  std::int32_t num_chunks() const { return num_chunks_; }
  std::int32_t num_microbatches() const { return num_microbatches_; }
  std::int32_t num_classes() const {  // kinds x chunks
    return num_kinds_ * num_chunks_;
  }
  Task task(std::int32_t local) const {
    const std::int32_t task_class = class_of(local);
    return Task{stages_[chunk_of_class(task_class)], kind_of_class(task_class),
                microbatch_of(local)};
  }
  // -1: not a task of this rank.
  std::int32_t local(const Task& task) const {
    const std::int32_t kind_slot = slot_of_kind_[static_cast<std::size_t>(task.kind)];
    if (kind_slot < 0 || task.microbatch < 0 || task.microbatch >= num_microbatches_) return -1;
    std::int32_t chunk = 0;
    while (chunk < num_chunks() && stages_[chunk] != task.stage) ++chunk;
    return chunk < num_chunks() ? local_in(kind_slot * num_chunks() + chunk, task.microbatch) : -1;
  }
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
  std::int32_t num_chunks_;
  std::int32_t num_kinds_;
  std::int32_t num_microbatches_;
  std::array<TaskKind, kNumTaskKinds> kinds_{};            // the first num_kinds_
  std::array<std::int8_t, kNumTaskKinds> slot_of_kind_{};  // -1: no such kind
};

class alignas(kCacheLineBytes) HintOrder {
 public:
  // `order` must name each task of the table exactly once; otherwise UserError, which names
  // the task and, for a repeated one, both positions.
  HintOrder(const TaskTable& table, HintRule rule, const std::vector<Task>& order,
            std::pmr::memory_resource* memory = std::pmr::get_default_resource());

  HintRule rule() const { return rule_; }
  std::int32_t num_tasks() const { return num_tasks_; }
  std::int32_t local_at(std::int32_t position) const { return locals_[num_tasks_ + position]; }
  std::int32_t position_of(std::int32_t local) const { return places_[local].position; }

  // A task's number in ReadySet: tasks of a class are counted in order of position.
  std::int32_t index_in_class(std::int32_t local) const { return places_[local].index_in_class; }
  std::int32_t local_in_class(std::int32_t task_class, std::int32_t index) const {
    return locals_[task_class * tasks_per_class_ + index];
  }

  void prefetch(std::int32_t local) const { rrfp::prefetch(&places_[local]); }
  void prefetch_in_class(std::int32_t task_class, std::int32_t index) const {
    rrfp::prefetch(&locals_[task_class * tasks_per_class_ + index]);
  }

  // The most units in flight at once when the order runs as it stands (taken at F, given back
  // at B or W): what slack 0 needs.
  std::int32_t peak_units() const { return peak_units_; }

 private:
  struct Place {
    std::int32_t position = -1;
    std::int32_t index_in_class = 0;
  };

  // What an arbiter asks for lies on one cache line.
  std::pmr::vector<Place> places_;  // by local
  HintRule rule_;
  std::int32_t tasks_per_class_;
  std::int32_t num_tasks_ = 0;
  std::int32_t peak_units_ = 0;
  // By class and index; behind them, by position.
  std::pmr::vector<std::int32_t> locals_;
};

}  // namespace rrfp
