// VirtualRun: the step engines of all ranks of a plan, driven by a virtual clock. The one event
// loop behind a rule's positions (StepPlan) and the simulated world (sim/world.hpp).
//
// One rank runs one task at a time, without preemption; it looks for the next task whenever one
// of its own retires or something arrives while it is idle. Events of one instant are all
// applied before anybody chooses, ranks choose in order: the outcome is a function of the
// plan and the model alone.
//
// Engine   StepEngine, or something with the same deliver, claim, retire and finished (tests
//          put broken ones here, to see that their checkers notice).
// Bound    Ends when no event is left: each task retires once, each message arrives once.
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

struct VirtualModel {
  std::function<std::int64_t(const Task&)> duration_ns;
  // When what `from` retired at now_ns reaches `target_stage` on another rank.
  std::function<std::int64_t(const Task& from, std::int32_t target_stage, std::int64_t now_ns)>
      arrival_ns;
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
      engines_.push_back(std::make_unique<Engine>(plan_, rank));
    }
    is_busy_.assign(num_ranks, false);
    is_touched_.assign(num_ranks, true);
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
  struct Event {
    std::int64_t at_ns = 0;
    std::int64_t number = 0;         // among events of one instant: the one made first
    std::int32_t rank = 0;
    std::int32_t local = -1;         // a retire; else an arrival:
    Task target{};
    std::int32_t source_stage = -1;
    bool operator<(const Event& other) const {  // priority_queue pops the greatest
      return at_ns != other.at_ns ? at_ns > other.at_ns : number > other.number;
    }
  };

  void push(Event event) {
    event.number = num_events_++;
    events_.push(event);
  }

  void apply(const Event& event) {
    is_touched_[event.rank] = true;
    if (event.local < 0) {
      deliver(event.rank, event.target, event.source_stage, event.at_ns);
      return;
    }
    const Task task = plan_->table(event.rank).task(event.local);
    is_busy_[event.rank] = false;
    outcome_.makespan_ns = std::max(outcome_.makespan_ns, event.at_ns);
    engines_[event.rank]->retire(event.local, event.at_ns);
    for (const std::int32_t stage : plan_->graph().targets_of(task)) {
      const Task target{stage, task.kind, task.microbatch};
      const std::int32_t rank = plan_->graph().rank_of(stage);
      if (rank == event.rank) {
        deliver(rank, target, task.stage, event.at_ns);
      } else {
        const std::int64_t at_ns = model_.arrival_ns(task, stage, event.at_ns);
        RRFP_CHECK(at_ns >= event.at_ns, "the output of " + to_text(task) +
                                             " would arrive before it was sent");
        push({.at_ns = at_ns, .rank = rank, .target = target, .source_stage = task.stage});
      }
    }
  }

  void deliver(std::int32_t rank, const Task& target, std::int32_t source_stage,
               std::int64_t now_ns) {
    const Delivery delivery = engines_[rank]->deliver(target, source_stage, nullptr, now_ns);
    RRFP_INVARIANT(delivery == Delivery::kWaiting || delivery == Delivery::kReady,
                   "an input of " + to_text(target) + " was not taken");
  }

  void choose(std::int64_t now_ns) {
    for (std::size_t rank = 0; rank < engines_.size(); ++rank) {
      if (!is_touched_[rank] || is_busy_[rank]) continue;
      is_touched_[rank] = false;
      const Choice choice = engines_[rank]->claim(now_ns);
      if (model_.on_choice) model_.on_choice(static_cast<std::int32_t>(rank), choice);
      if (choice.local < 0) continue;
      const Task task = plan_->table(static_cast<std::int32_t>(rank)).task(choice.local);
      const std::int64_t duration_ns = model_.duration_ns(task);
      RRFP_CHECK(duration_ns >= 0, to_text(task) + " would take a negative time");
      is_busy_[rank] = true;
      outcome_.ranks[rank].push_back({task, now_ns, now_ns + duration_ns});
      push({.at_ns = now_ns + duration_ns,
            .rank = static_cast<std::int32_t>(rank),
            .local = choice.local});
    }
  }

  std::shared_ptr<const StepPlan> plan_;
  const VirtualModel& model_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::priority_queue<Event> events_;
  std::int64_t num_events_ = 0;
  std::vector<bool> is_busy_;     // by rank: inside a task
  std::vector<bool> is_touched_;  // by rank: something came or retired since it last looked
  VirtualOutcome outcome_;
};

template <class Engine = StepEngine>
VirtualOutcome run_virtually(std::shared_ptr<const StepPlan> plan, const VirtualModel& model) {
  return VirtualRun<Engine>(std::move(plan), model).run();
}

}  // namespace rrfp
