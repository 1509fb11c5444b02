// VirtualRun: the step engines of all ranks of a plan, driven by a virtual clock. The one event
// loop behind a rule's positions (StepPlan) and the simulated world (sim/world.hpp).
//
// One rank runs one task at a time, without preemption; it looks for the next task whenever one
// of its own retires, something arrives while it is idle, or a wait for an announced task ends.
// Events of one instant are all applied before anybody chooses, ranks choose in order: the outcome
// is a function of the plan and the model alone.
//
// Engine   StepEngine, or something made from it (tests put broken ones here, to see that their
//          checkers notice).
// Bound    Ends when no event is left: each task retires once, each message arrives once (or
//          again), each announced task is waited for once.
// Threads  the caller's.
// Memory   Where there are many tasks, hardly anything of a rank is in the cache when its turn
//          comes. So it lies together, in large pages, and is asked for while the events before it
//          are applied.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <memory_resource>
#include <vector>

#include "base/check.hpp"
#include "base/large_pages.hpp"
#include "base/prefetch.hpp"
#include "runtime/event_queue.hpp"
#include "runtime/step_engine.hpp"
#include "runtime/step_plan.hpp"
#include "runtime/virtual_model.hpp"
#include "runtime/virtual_rank.hpp"

namespace rrfp {

template <class Engine = StepEngine>
class VirtualRun {
 public:
  VirtualRun(std::shared_ptr<const StepPlan> plan, const VirtualModel& model)
      : plan_(std::move(plan)),
        model_(model),
        is_large_(std::int64_t{plan_->graph().num_ranks()} * plan_->table(0).num_tasks() >
                  kTasksInCache) {
    for (std::int32_t rank = 0; rank < plan_->graph().num_ranks(); ++rank) {
      TaskTimes* times = model_.times == nullptr ? nullptr : &model_.times->at(rank);
      ranks_.emplace_back(plan_, rank, times, &memory_);
      touch(rank);
    }
  }

  VirtualOutcome run() {
    choose(0);
    while (!events_.empty()) {
      do {
        apply(events_.pop([&](const Event& soon, std::size_t within) { fetch(soon, within); }));
      } while (events_.is_any_due());
      choose(events_.now_ns());
    }
    outcome_.finished = true;
    for (Rank& rank : ranks_) {
      outcome_.ranks.push_back(rank.tasks());
      outcome_.finished = outcome_.finished && rank.engine.finished();
      outcome_.peak_units.push_back(rank.engine.arbiter().peak_units());
    }
    return std::move(outcome_);
  }

 private:
  using Rank = VirtualRank<Engine>;

  // Of all ranks; about as many as the second cache of a core holds the state of.
  static constexpr std::int64_t kTasksInCache = 4096;

  enum class EventKind : std::uint8_t { kRetire, kArrival, kAnnouncement, kWake };

  struct Event {
    std::int64_t at_ns = 0;
    EventKind kind = EventKind::kWake;
    bool is_duplicate = false;       // kArrival
    std::int32_t rank = 0;
    Task task{};                     // kRetire; kArrival, kAnnouncement: whose input it is
    std::int32_t source_stage = -1;  // kArrival, kAnnouncement
    std::int64_t duration_ns = 0;    // kArrival: what it took; kAnnouncement: what it should
  };

  // In three steps, as each needs what the one before has asked for.
  void fetch(const Event& event, std::size_t within) const {
    if (!is_large_) return;
    const Rank& rank = ranks_[event.rank];
    if (within > 16) {
      fetch(event.rank);
    } else if (event.kind == EventKind::kWake) {  // of no task
      return;
    } else if (within > 4) {
      rank.prefetch(event.task);
    } else if (within > 1) {
      rank.engine.prefetch_further(event.task);
    }
  }

  void fetch(std::int32_t rank) const {
    ranks_[rank].prefetch();
    prefetch(&plan_->table(rank));
    prefetch(&plan_->hint_order(rank));
  }

  void apply(const Event& event) {
    if (event.kind == EventKind::kAnnouncement) {  // changes nothing until the rank looks again
      ranks_[event.rank].engine.announce(event.task, event.source_stage, event.duration_ns,
                                         event.at_ns);
      return;
    }
    touch(event.rank);
    if (event.kind == EventKind::kArrival) deliver(event);
    if (event.kind == EventKind::kRetire) retire(event);
  }

  void retire(const Event& event) {
    const Task& task = event.task;
    Rank& rank = ranks_[event.rank];
    rank.is_busy = false;
    outcome_.makespan_ns = std::max(outcome_.makespan_ns, event.at_ns);
    rank.engine.retire(plan_->table(event.rank).local(task), event.at_ns);
    for (const std::int32_t stage : plan_->graph().targets_of(task)) {
      Event arrival{.at_ns = event.at_ns,
                    .kind = EventKind::kArrival,
                    .rank = plan_->graph().rank_of(stage),
                    .task = {stage, task.kind, task.microbatch},
                    .source_stage = task.stage,
                    .duration_ns = event.duration_ns};
      if (arrival.rank == event.rank) {
        deliver(arrival);
      } else {
        send(task, arrival);
      }
    }
  }

  // `arrival.at_ns` is when it is sent.
  void send(const Task& from, Event arrival) {
    const std::int64_t now_ns = arrival.at_ns;
    const std::int32_t stage = arrival.task.stage;
    arrival.at_ns = model_.arrival_ns(from, stage, now_ns);
    RRFP_CHECK(arrival.at_ns >= now_ns, "the output of " + to_text(from) +
                                            " would arrive before it was sent");
    if (arrival.at_ns == kNever) return;
    events_.push(arrival);
    if (!model_.again_ns) return;
    const std::int64_t again_ns = model_.again_ns(from, stage, now_ns);
    if (again_ns == kNever) return;
    RRFP_CHECK(again_ns >= arrival.at_ns, to_text(from) + " would come again before it has come");
    arrival.at_ns = again_ns;
    arrival.is_duplicate = true;
    events_.push(arrival);
  }

  void deliver(const Event& event) {
    Rank& rank = ranks_[event.rank];
    const Delivery delivery =
        rank.engine.deliver(event.task, event.source_stage, nullptr, event.at_ns);
    if (event.is_duplicate) {
      RRFP_INVARIANT(delivery == Delivery::kDuplicate,
                     "an input of " + to_text(event.task) + " was taken twice");
      return;
    }
    RRFP_INVARIANT(delivery == Delivery::kWaiting || delivery == Delivery::kReady,
                   "an input of " + to_text(event.task) + " was not taken");
    if (rank.sender_took_ns.empty()) return;
    rank.sender_took_ns[plan_->table(event.rank).local(event.task)] = event.duration_ns;
  }

  void touch(std::int32_t rank) {
    if (!ranks_[rank].is_touched) touched_.push_back(rank);
    ranks_[rank].is_touched = true;
  }

  void choose(std::int64_t now_ns) {
    std::sort(touched_.begin(), touched_.end());
    for (std::size_t at = 0; at < touched_.size(); ++at) {
      if (is_large_ && at + 2 < touched_.size()) fetch(touched_[at + 2]);
      const std::int32_t number = touched_[at];
      Rank& rank = ranks_[number];
      rank.is_touched = false;
      if (rank.is_busy) continue;  // it looks when it retires
      const Choice choice = rank.engine.claim(now_ns);
      if (model_.on_choice) model_.on_choice(number, choice);
      if (choice.local >= 0) {
        start(number, choice.local, now_ns);
      } else if (choice.wait_until_ns > now_ns) {
        events_.push({.at_ns = choice.wait_until_ns, .kind = EventKind::kWake, .rank = number});
      }
    }
    touched_.clear();
  }

  void start(std::int32_t rank, std::int32_t local, std::int64_t now_ns) {
    const Task task = plan_->table(rank).task(local);
    const std::int64_t duration_ns = model_.duration_ns(task);
    RRFP_CHECK(duration_ns >= 0, to_text(task) + " would take a negative time");
    ranks_[rank].is_busy = true;
    ranks_[rank].ran.push_back(local);
    events_.push({.at_ns = now_ns + duration_ns,
                  .kind = EventKind::kRetire,
                  .rank = rank,
                  .task = task,
                  .duration_ns = duration_ns});
    if (plan_->waits()) announce(rank, local, now_ns);
  }

  void announce(std::int32_t rank, std::int32_t local, std::int64_t now_ns) {
    const Task task = plan_->table(rank).task(local);
    Rank& from = ranks_[rank];
    from.engine.learn_travel(local, from.sender_took_ns[local]);
    const std::int64_t usual_ns = from.engine.usual_duration_ns(local);
    if (usual_ns == 0) return;
    for (const std::int32_t stage : plan_->graph().targets_of(task)) {
      const std::int32_t target_rank = plan_->graph().rank_of(stage);
      if (target_rank == rank) continue;
      events_.push({.at_ns = now_ns + model_.announcement_lag_ns,
                    .kind = EventKind::kAnnouncement,
                    .rank = target_rank,
                    .task = {stage, task.kind, task.microbatch},
                    .source_stage = task.stage,
                    .duration_ns = usual_ns});
    }
  }

  std::shared_ptr<const StepPlan> plan_;
  const VirtualModel& model_;
  const bool is_large_;  // worth being fetched ahead
  LargePages pages_;
  std::pmr::monotonic_buffer_resource memory_{&pages_};  // of ranks_
  std::pmr::deque<Rank> ranks_{&memory_};
  EventQueue<Event> events_;
  std::vector<std::int32_t> touched_;  // ranks
  VirtualOutcome outcome_;
};

template <class Engine = StepEngine>
VirtualOutcome run_virtually(std::shared_ptr<const StepPlan> plan, const VirtualModel& model) {
  return VirtualRun<Engine>(std::move(plan), model).run();
}

}  // namespace rrfp
