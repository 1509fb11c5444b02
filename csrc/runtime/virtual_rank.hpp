// VirtualRank: one rank of a VirtualRun: its step engine, and what the run knows of it.
//
// Memory   All of it from `memory`: where the ranks are many, what comes from the heap lies in
//          small pages, and nearly every look at it would miss the translation cache as well.
#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <vector>

#include "base/cache_line.hpp"
#include "base/prefetch.hpp"
#include "runtime/step_plan.hpp"
#include "runtime/virtual_model.hpp"

namespace rrfp {

template <class Engine>
struct alignas(kCacheLineBytes) VirtualRank {
  VirtualRank(const std::shared_ptr<const StepPlan>& plan, std::int32_t rank, TaskTimes* times,
              std::pmr::memory_resource* memory)
      : ran(memory),
        sender_took_ns(plan->waits() ? plan->table(rank).num_tasks() : 0, 0, memory),
        engine(plan, rank, times, nullptr, memory) {
    ran.reserve(plan->table(rank).num_tasks());
  }

  // In the order run; all of them have retired.
  std::vector<VirtualTask> tasks() const {
    std::vector<VirtualTask> tasks;
    tasks.reserve(ran.size());
    for (const std::int32_t local : ran) {
      const TaskRecord& record = engine.record(local);
      tasks.push_back({engine.table().task(local), record.claimed_ns, record.retired_ns});
    }
    return tasks;
  }

  // Asks for the object itself; then for what an event of `task` needs.
  void prefetch() const { rrfp::prefetch(this, sizeof *this); }
  void prefetch(const Task& task) const {
    rrfp::prefetch(ran.data() + ran.size());
    engine.prefetch(task);
  }

  bool is_busy = false;                 // inside a task
  bool is_touched = false;              // something came or retired since it last looked
  std::pmr::vector<std::int32_t> ran;   // locals; the engine knows when
  std::pmr::vector<std::int64_t> sender_took_ns;  // by local, where the plan waits
  Engine engine;
};

}  // namespace rrfp
