// StepChecker: judges a schedule from what was run and when, and from nothing else: it works
// out arrivals, units and positions anew and shares no code with the engine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "random_step.hpp"

namespace rrfp::test {

struct Schedule {
  bool finished = false;
  std::vector<std::vector<VirtualTask>> ranks;
  std::vector<std::int32_t> peak_units;
};

class StepChecker {
 public:
  // `slack`, `limits` and the positions are those that the schedule must keep.
  StepChecker(const RandomStep& step, const StepPlan& plan, const Schedule& schedule)
      : step_(step), plan_(plan), schedule_(schedule), slack_(step.options().slack) {}

  // The first thing that is wrong, in words; empty when nothing is.
  std::string verdict() {
    if (!schedule_.finished) return "the step did not finish";
    std::string wrong = check_once();
    if (!wrong.empty()) return wrong;
    work_out_arrivals();
    for (std::int32_t rank = 0; rank < step_.num_ranks() && wrong.empty(); ++rank) {
      wrong = check_rank(rank);
    }
    return wrong;
  }

 private:
  using Key = std::tuple<std::int32_t, TaskKind, std::int32_t>;
  static Key key(const Task& task) { return {task.stage, task.kind, task.microbatch}; }

  std::string check_once() {
    std::map<Key, int> times_run;
    for (std::int32_t rank = 0; rank < step_.num_ranks(); ++rank) {
      for (const VirtualTask& ran : schedule_.ranks[rank]) {
        if (ran.task.stage != rank) return to_text(ran.task) + " ran on another rank";
        if (++times_run[key(ran.task)] > 1) return to_text(ran.task) + " ran twice";
      }
    }
    const std::size_t num_tasks = std::size_t{2} * step_.num_ranks() * step_.num_microbatches();
    if (times_run.size() != num_tasks) return "a task did not run";
    return "";
  }

  // ready_: when the last input of each task was there.
  void work_out_arrivals() {
    const std::int32_t last = step_.num_ranks() - 1;
    for (std::int32_t rank = 0; rank <= last; ++rank) {
      std::int64_t latest_ns[2] = {0, 0};  // of the two links of this rank
      for (const VirtualTask& ran : schedule_.ranks[rank]) {
        const bool is_forward = ran.task.kind == TaskKind::kForward;
        if (is_forward) raise(rank, TaskKind::kBackward, ran.task.microbatch, ran.end_ns);
        const std::int32_t target = is_forward ? rank + 1 : rank - 1;
        if (target < 0 || target > last) continue;
        std::int64_t& link_ns = latest_ns[is_forward ? 0 : 1];
        std::int64_t at_ns = ran.end_ns + step_.latency_ns(ran.task);
        if (step_.fifo_links()) at_ns = std::max(at_ns, link_ns);
        link_ns = std::max(link_ns, at_ns);
        raise(target, ran.task.kind, ran.task.microbatch, at_ns);
      }
    }
  }

  void raise(std::int32_t stage, TaskKind kind, std::int32_t microbatch, std::int64_t at_ns) {
    std::int64_t& ready_ns = ready_ns_[{stage, kind, microbatch}];
    ready_ns = std::max(ready_ns, at_ns);
  }

  std::string check_rank(std::int32_t rank) {
    const auto& ran = schedule_.ranks[rank];
    const std::vector<Task> order = positions(rank);
    const std::int32_t limit = limit_of(rank, order);
    std::vector<bool> is_claimed(order.size(), false);
    std::int64_t free_from_ns = 0;
    std::int32_t units = 0;
    std::int32_t peak = 0;
    std::size_t first_unclaimed = 0;
    for (std::size_t i = 0; i < ran.size(); ++i) {
      const auto& [task, start_ns, end_ns] = ran[i];
      const std::string name = to_text(task);
      if (start_ns < free_from_ns) return name + " ran beside another task";
      if (end_ns - start_ns != step_.duration_ns(task)) return name + " took another time";
      if (start_ns < ready_ns_[key(task)]) return name + " ran before its inputs were there";
      const std::size_t at = std::find(order.begin(), order.end(), task) - order.begin();
      const bool is_forward = task.kind == TaskKind::kForward;
      while (is_claimed[first_unclaimed]) ++first_unclaimed;
      if (slack_ == 0 && at != i) return name + " ran out of the fixed order";
      if (slack_ > 0 && is_forward && at > first_unclaimed + static_cast<std::size_t>(slack_)) {
        return name + " overtook more than the slack";
      }
      if (slack_ == kUnlimited) {
        const std::string idle =
            check_idle(order, is_claimed, at, std::max(free_from_ns, std::int64_t{0}), start_ns,
                       units < limit);
        if (!idle.empty()) return "before " + name + ": " + idle;
      }
      units += is_forward ? 1 : -1;
      peak = std::max(peak, units);
      if (units > limit) return name + " took a unit beyond the limit";
      is_claimed[at] = true;
      free_from_ns = end_ns;
    }
    if (peak != schedule_.peak_units[rank]) return "the reported peak of units is wrong";
    return "";
  }

  // Unlimited slack: nothing admissible may have been ready earlier than the start, and of the
  // tasks of one kind the one the hint prefers comes first. What gets ready in the very instant
  // of the start may have come before the choice or after it (tasks may take no time).
  std::string check_idle(const std::vector<Task>& order, const std::vector<bool>& is_claimed,
                         std::size_t chosen, std::int64_t free_from_ns, std::int64_t start_ns,
                         bool has_unit) {
    for (std::size_t at = 0; at < order.size(); ++at) {
      if (is_claimed[at] || at == chosen) continue;
      if (order[at].kind == TaskKind::kForward && !has_unit) continue;
      const std::int64_t ready_ns = ready_ns_[key(order[at])];
      if (std::max(ready_ns, free_from_ns) < start_ns) {
        return "the rank was idle while " + to_text(order[at]) + " could run";
      }
      if (order[at].kind == order[chosen].kind && at < chosen && ready_ns < start_ns) {
        return to_text(order[at]) + " of the same kind stands before it and was ready";
      }
    }
    if (std::max(ready_ns_[key(order[chosen])], free_from_ns) < start_ns &&
        (order[chosen].kind == TaskKind::kBackward || has_unit)) {
      return "the rank was idle while it could run";
    }
    return "";
  }

  // A user's order is taken from the user, the others from the plan.
  std::vector<Task> positions(std::int32_t rank) const {
    std::vector<Task> order;
    for (const Task& task : step_.options().order) {
      if (task.stage == rank) order.push_back(task);
    }
    const HintOrder& hint = plan_.hint_order(rank);
    for (std::int32_t at = 0; step_.options().order.empty() && at < hint.num_tasks(); ++at) {
      order.push_back(plan_.table(rank).task(hint.local_at(at)));
    }
    return order;
  }

  std::int32_t limit_of(std::int32_t rank, const std::vector<Task>& order) const {
    if (!step_.options().limits.empty()) return step_.options().limits[rank];
    if (slack_ != 0) return step_.num_ranks();
    std::int32_t units = 0;
    std::int32_t peak = 0;
    for (const Task& task : order) {
      units += task.kind == TaskKind::kForward ? 1 : -1;
      peak = std::max(peak, units);
    }
    return peak;
  }

  const RandomStep& step_;
  const StepPlan& plan_;
  const Schedule& schedule_;
  const std::int32_t slack_;
  std::map<Key, std::int64_t> ready_ns_;
};

}  // namespace rrfp::test
