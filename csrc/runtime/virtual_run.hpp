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
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <vector>

#include "base/check.hpp"
#include "runtime/step_engine.hpp"
#include "runtime/step_plan.hpp"

namespace rrfp {

inline constexpr std::int64_t kNever = INT64_MAX;  // a message that is lost

struct VirtualModel {
  using ArrivalNs = std::function<std::int64_t(const Task& from, std::int32_t target_stage,
                                               std::int64_t now_ns)>;
  std::function<std::int64_t(const Task&)> duration_ns;
  // When what `from` retired at now_ns reaches `target_stage` on another rank.
  ArrivalNs arrival_ns;
  // When it does so once more, not before; kNever: it does not. May be empty.
  ArrivalNs again_ns;
  // From the start of a task to the arrival of its announcement, where the plan waits.
  std::int64_t announcement_lag_ns = 0;
  // What earlier steps have taught, by rank, for this one to use and add to; null: nothing.
  std::vector<TaskTimes>* times = nullptr;
  // Told of every look at the ready set; may be empty.
  std::function<void(std::int32_t rank, const Choice&)> on_choice;
};

struct VirtualTask {
  Task task;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

struct VirtualOutcome {
  bool finished = false;                        // false: deadlock; `ranks` holds what ran
  std::int64_t makespan_ns = 0;
  std::vector<std::vector<VirtualTask>> ranks;  // per rank, in the order run
  std::vector<std::int32_t> peak_units;         // per rank
};

template <class Engine = StepEngine>
class VirtualRun {
 public:
  VirtualRun(std::shared_ptr<const StepPlan> plan, const VirtualModel& model)
      : plan_(std::move(plan)), model_(model) {
    const std::int32_t num_ranks = plan_->graph().num_ranks();
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
      TaskTimes* times = model_.times == nullptr ? nullptr : &model_.times->at(rank);
      engines_.push_back(std::make_unique<Engine>(plan_, rank, times));
      sender_took_ns_.emplace_back(plan_->table(rank).num_tasks(), 0);
    }
    is_busy_.assign(num_ranks, false);
    is_touched_.assign(num_ranks, false);
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) touch(rank);
    outcome_.ranks.resize(num_ranks);
  }

  VirtualOutcome run() {
    choose(0);
    while (!events_.empty()) {
      const std::int64_t now_ns = events_.top().at_ns;
      while (!events_.empty() && events_.top().at_ns == now_ns) {
        const Event event = events_.top();
        events_.pop();
        apply(event);
      }
      choose(now_ns);
    }
    outcome_.finished = true;
    for (const auto& engine : engines_) {
      outcome_.finished = outcome_.finished && engine->finished();
      outcome_.peak_units.push_back(engine->arbiter().peak_units());
    }
    return std::move(outcome_);
  }

 private:
  enum class EventKind : std::uint8_t { kRetire, kArrival, kAnnouncement, kWake };

  struct Event {
    std::int64_t at_ns = 0;
    std::int64_t number = 0;         // among events of one instant: the one made first
    EventKind kind = EventKind::kWake;
    std::int32_t rank = 0;
    std::int32_t local = -1;         // kRetire
    Task target{};                   // kArrival, kAnnouncement
    std::int32_t source_stage = -1;
    std::int64_t duration_ns = 0;    // kArrival: what it took; kAnnouncement: what it should
    bool is_duplicate = false;       // kArrival
    bool operator<(const Event& other) const {  // priority_queue pops the greatest
      return at_ns != other.at_ns ? at_ns > other.at_ns : number > other.number;
    }
  };

  void push(Event event) {
    event.number = num_events_++;
    events_.push(event);
  }

  void apply(const Event& event) {
    if (event.kind == EventKind::kAnnouncement) {  // changes nothing until the rank looks again
      engines_[event.rank]->announce(event.target, event.source_stage, event.duration_ns,
                                     event.at_ns);
      return;
    }
    touch(event.rank);
    if (event.kind == EventKind::kArrival) deliver(event);
    if (event.kind == EventKind::kRetire) retire(event);
  }

  void retire(const Event& event) {
    const Task task = plan_->table(event.rank).task(event.local);
    is_busy_[event.rank] = false;
    outcome_.makespan_ns = std::max(outcome_.makespan_ns, event.at_ns);
    engines_[event.rank]->retire(event.local, event.at_ns);
    for (const std::int32_t stage : plan_->graph().targets_of(task)) {
      Event arrival{.at_ns = event.at_ns,
                    .kind = EventKind::kArrival,
                    .rank = plan_->graph().rank_of(stage),
                    .target = {stage, task.kind, task.microbatch},
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
    const std::int32_t stage = arrival.target.stage;
    arrival.at_ns = model_.arrival_ns(from, stage, now_ns);
    RRFP_CHECK(arrival.at_ns >= now_ns, "the output of " + to_text(from) +
                                            " would arrive before it was sent");
    if (arrival.at_ns == kNever) return;
    push(arrival);
    if (!model_.again_ns) return;
    const std::int64_t again_ns = model_.again_ns(from, stage, now_ns);
    if (again_ns == kNever) return;
    RRFP_CHECK(again_ns >= arrival.at_ns, to_text(from) + " would come again before it has come");
    arrival.at_ns = again_ns;
    arrival.is_duplicate = true;
    push(arrival);
  }

  void deliver(const Event& event) {
    const Delivery delivery = engines_[event.rank]->deliver(event.target, event.source_stage,
                                                            nullptr, event.at_ns);
    if (event.is_duplicate) {
      RRFP_INVARIANT(delivery == Delivery::kDuplicate,
                     "an input of " + to_text(event.target) + " was taken twice");
      return;
    }
    RRFP_INVARIANT(delivery == Delivery::kWaiting || delivery == Delivery::kReady,
                   "an input of " + to_text(event.target) + " was not taken");
    sender_took_ns_[event.rank][plan_->table(event.rank).local(event.target)] = event.duration_ns;
  }

  void touch(std::int32_t rank) {
    if (!is_touched_[rank]) touched_.push_back(rank);
    is_touched_[rank] = true;
  }

  void choose(std::int64_t now_ns) {
    std::sort(touched_.begin(), touched_.end());
    for (const std::int32_t rank : touched_) {
      is_touched_[rank] = false;
      if (is_busy_[rank]) continue;  // it looks when it retires
      const Choice choice = engines_[rank]->claim(now_ns);
      if (model_.on_choice) model_.on_choice(rank, choice);
      if (choice.local >= 0) {
        start(rank, choice.local, now_ns);
      } else if (choice.wait_until_ns > now_ns) {
        push({.at_ns = choice.wait_until_ns, .kind = EventKind::kWake, .rank = rank});
      }
    }
    touched_.clear();
  }

  void start(std::int32_t rank, std::int32_t local, std::int64_t now_ns) {
    const Task task = plan_->table(rank).task(local);
    const std::int64_t duration_ns = model_.duration_ns(task);
    RRFP_CHECK(duration_ns >= 0, to_text(task) + " would take a negative time");
    is_busy_[rank] = true;
    outcome_.ranks[rank].push_back({task, now_ns, now_ns + duration_ns});
    push({.at_ns = now_ns + duration_ns,
          .kind = EventKind::kRetire,
          .rank = rank,
          .local = local,
          .duration_ns = duration_ns});
    if (plan_->waits()) announce(rank, local, now_ns);
  }

  void announce(std::int32_t rank, std::int32_t local, std::int64_t now_ns) {
    const Task task = plan_->table(rank).task(local);
    engines_[rank]->learn_travel(local, sender_took_ns_[rank][local]);
    const std::int64_t usual_ns = engines_[rank]->usual_duration_ns(local);
    if (usual_ns == 0) return;
    for (const std::int32_t stage : plan_->graph().targets_of(task)) {
      const std::int32_t target_rank = plan_->graph().rank_of(stage);
      if (target_rank == rank) continue;
      push({.at_ns = now_ns + model_.announcement_lag_ns,
            .kind = EventKind::kAnnouncement,
            .rank = target_rank,
            .target = {stage, task.kind, task.microbatch},
            .source_stage = task.stage,
            .duration_ns = usual_ns});
    }
  }

  std::shared_ptr<const StepPlan> plan_;
  const VirtualModel& model_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::priority_queue<Event> events_;
  std::int64_t num_events_ = 0;
  std::vector<bool> is_busy_;     // by rank: inside a task
  std::vector<bool> is_touched_;  // by rank: something came or retired since it last looked
  std::vector<std::int32_t> touched_;  // those ranks
  std::vector<std::vector<std::int64_t>> sender_took_ns_;  // by rank and local
  VirtualOutcome outcome_;
};

template <class Engine = StepEngine>
VirtualOutcome run_virtually(std::shared_ptr<const StepPlan> plan, const VirtualModel& model) {
  return VirtualRun<Engine>(std::move(plan), model).run();
}

}  // namespace rrfp
