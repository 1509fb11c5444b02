// StepChecker: judges a schedule from what was run and when, and from nothing else: it works
// out arrivals, units and admission anew and shares no code with the engine. From the plan it
// takes positions, and the slack and limits where the step leaves them to the hint.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "byte_rule.hpp"
#include "schedule.hpp"

namespace rrfp::test {

class StepChecker {
 public:
  static inline AdmissionCounts counts;
  // has_history: the ranks had learnt how long tasks take before the step.
  StepChecker(const RandomStep& step, const StepPlan& plan, const Schedule& schedule,
              bool has_history = false)
      : step_(step), plan_(plan), schedule_(schedule), has_history_(has_history),
        bytes_(step, plan),
        slack_(step.options().slack == kAutoSlack ? plan.options().slack : step.options().slack) {}

  // The first thing that is wrong, in words; empty when nothing is. A step that has lost the
  // message of a task cannot be complete: what ran is judged.
  std::string verdict(const std::optional<Task>& lost = std::nullopt) {
    if (!lost && !schedule_.finished) return "the step did not finish";
    if (lost && schedule_.finished) return "the step finished without a message";
    std::string wrong = check_once(!lost);
    if (!wrong.empty()) return wrong;
    ready_ns_ = ready_times(step_, schedule_, lost);
    for (std::int32_t rank = 0; rank < step_.num_ranks() && wrong.empty(); ++rank) {
      wrong = check_rank(rank);
    }
    return wrong;
  }

 private:
  // One rank while its schedule is gone through, task by task.
  struct Rank {
    std::int32_t limit = 0;
    std::int32_t units = 0;
    std::int32_t peak = 0;
    std::int64_t free_from_ns = 0;
    std::int64_t longest_ns = 0;                 // F or W so far
    std::vector<Task> order;                     // by position
    std::vector<bool> is_claimed;                // by position
    std::vector<std::int32_t> position;          // by index()
    std::size_t first_unclaimed = 0;
    std::vector<std::int32_t> held, forwards;    // by microbatch
    std::vector<std::int64_t> bytes;             // by microbatch
    std::map<std::int32_t, std::int32_t> weights;  // by stage: how many have run
  };

  std::size_t index(const Task& task) const { return step_.index(task); }
  static bool is_forward(const Task& task) { return task.kind == TaskKind::kForward; }
  static bool waits(const Task& task) {
    return is_forward(task) || task.kind == TaskKind::kWeightGrad;
  }
  static bool gives_back(const Task& task) {
    return task.kind == TaskKind::kBackward || task.kind == TaskKind::kWeightGrad;
  }

  std::string check_once(bool is_complete) {
    std::vector<bool> has_run(step_.num_tasks(), false);
    std::size_t num_run = 0;
    for (std::int32_t rank = 0; rank < step_.num_ranks(); ++rank) {
      for (const VirtualTask& ran : schedule_.ranks[rank]) {
        if (step_.rank_of(ran.task.stage) != rank) return to_text(ran.task) + " ran elsewhere";
        if (has_run[index(ran.task)]) return to_text(ran.task) + " ran twice";
        has_run[index(ran.task)] = true;
        ++num_run;
      }
    }
    const std::size_t num_tasks =
        step_.kinds().size() * step_.num_stages() * step_.num_microbatches();
    return is_complete && num_run != num_tasks ? "a task did not run" : "";
  }

  std::string check_rank(std::int32_t number) {
    Rank rank = make_rank(number);
    for (const VirtualTask& ran : schedule_.ranks[number]) {
      const std::string wrong = check_task(rank, ran);
      if (!wrong.empty()) return wrong;
      claim(rank, ran);
    }
    if (rank.peak != schedule_.peak_units[number]) return "the reported peak of units is wrong";
    return "";
  }

  std::string check_task(const Rank& rank, const VirtualTask& ran) {
    const auto& [task, start_ns, end_ns] = ran;
    const std::string name = to_text(task);
    const std::int64_t ready_ns = ready_ns_[index(task)];
    if (start_ns < rank.free_from_ns) return name + " ran beside another task";
    if (end_ns - start_ns != step_.duration_ns(task)) return name + " took another time";
    if (ready_ns == kNotReady || start_ns < ready_ns) {
      return name + " ran before its inputs were there";
    }
    const auto at = static_cast<std::size_t>(rank.position[index(task)]);
    if (slack_ == 0 && at != rank.first_unclaimed) return name + " ran out of the fixed order";
    if (slack_ > 0 && is_forward(task) && !has_begun_earliest(rank, task) &&
        at > rank.first_unclaimed + static_cast<std::size_t>(slack_)) {
      return name + " overtook more than the slack";
    }
    if (slack_ != 0 && !may_run(rank, task)) return name + " ran without the right to";
    if (is_forward(task) && rank.units >= rank.limit) return name + " took a unit too many";
    const std::string idle = slack_ == kUnlimited ? check_idle(rank, ran) : "";
    return idle.empty() ? "" : "before " + name + ": " + idle;
  }

  void claim(Rank& rank, const VirtualTask& ran) const {
    const Task& task = ran.task;
    rank.is_claimed[rank.position[index(task)]] = true;
    while (rank.first_unclaimed < rank.order.size() && rank.is_claimed[rank.first_unclaimed]) {
      ++rank.first_unclaimed;
    }
    const std::int32_t moved = is_forward(task) ? 1 : gives_back(task) ? -1 : 0;
    rank.units += moved;
    rank.held[task.microbatch] += moved;
    if (bytes_.applies()) rank.bytes[task.microbatch] += moved * bytes_.size(task);
    rank.peak = std::max(rank.peak, rank.units);
    if (is_forward(task)) ++rank.forwards[task.microbatch];
    if (gives_back(task)) ++rank.weights[task.stage];
    rank.free_from_ns = ran.end_ns;
    if (waits(task)) rank.longest_ns = std::max(rank.longest_ns, ran.end_ns - ran.start_ns);
  }

  std::int32_t earliest(const Rank& rank) const {
    for (const std::int32_t m : plan_.microbatch_order()) {
      if (rank.forwards[m] < step_.num_chunks()) return m;
    }
    return -1;
  }
  bool has_begun_earliest(const Rank& rank, const Task& task) const {
    return task.microbatch == earliest(rank) && rank.forwards[task.microbatch] > 0;
  }

  // Admission of forwards, and the order of what completes the weights' gradients.
  bool may_run(const Rank& rank, const Task& task) const {
    if (!is_forward(task)) {
      return !step_.options().weight_in_order || !gives_back(task) ||
             plan_.microbatch_order()[next_weight(rank, task.stage)] == task.microbatch;
    }
    const std::int32_t free = rank.limit - rank.units, kept = earliest(rank);
    if (bytes_.applies()) {
      const bool may = bytes_.fits(rank.held, rank.bytes, task, kept);
      return ++(may ? counts.bytes : counts.bytes_held), may;
    }
    if (slack_ == kUnlimited && !step_.options().weight_in_order) {
      const bool may = free >= step_.num_chunks() - step_.chunk_of(task.stage);
      return ++(may ? counts.levelled : counts.levelled_held), may;
    }
    if (task.microbatch == kept) return ++counts.earliest, free >= 1;
    const bool may = free >= step_.num_chunks() - rank.held[kept] + 1;
    return ++(may ? counts.not_earliest : counts.not_earliest_held), may;
  }
  bool is_behind(const Rank& rank, std::size_t at, std::int64_t now_ns) const {
    return bytes_.is_behind(rank.order, at, earliest(rank), [&](std::size_t before) {
      const std::int64_t ready_ns = ready_ns_[index(rank.order[before])];
      return !rank.is_claimed[before] && ready_ns != kNotReady && ready_ns < now_ns;
    });
  }
  static std::size_t next_weight(const Rank& rank, std::int32_t stage) {
    const auto it = rank.weights.find(stage);
    return it == rank.weights.end() ? 0 : static_cast<std::size_t>(it->second);
  }

  // Unlimited slack: nothing that may run was ready before the start, save for a wait; and of the
  // tasks of one kind and stage the one the hint prefers comes first. What gets ready in the very
  // instant of the start may have come before the choice or after it (tasks may take no time).
  std::string check_idle(const Rank& rank, const VirtualTask& chosen) const {
    const bool is_rule = step_.options().hint == "bf" || step_.options().hint == "bfw" ||
                         step_.options().hint == "fb";
    const auto chosen_at = static_cast<std::size_t>(rank.position[index(chosen.task)]);
    if (is_behind(rank, chosen_at, chosen.start_ns)) return "it passed a larger forward";
    for (std::size_t at = rank.first_unclaimed; at < rank.order.size(); ++at) {
      const Task& task = rank.order[at];
      const std::int64_t ready_ns = ready_ns_[index(task)];
      if (rank.is_claimed[at] || ready_ns == kNotReady || ready_ns >= chosen.start_ns) continue;
      if (!may_run(rank, task) || is_behind(rank, at, chosen.start_ns + 1)) continue;
      const std::int64_t idle_ns = chosen.start_ns - std::max(ready_ns, rank.free_from_ns);
      if (idle_ns > patience_ns(rank)) {
        return "the rank was idle while " + to_text(task) + " could run";
      }
      if (task.kind == chosen.task.kind && task.stage == chosen.task.stage && at < chosen_at) {
        return to_text(task) + " of the same kind stands before it and was ready";
      }
      if (is_rule && chosen.task.kind == TaskKind::kWeightGrad &&
          task.kind != TaskKind::kWeightGrad) {
        return to_text(task) + " is no filler and was ready";
      }
    }
    return "";
  }

  // A wait is for what is due within 0.9 of the F or W that waits; one may follow another, the
  // more so the more chunks there are to announce. The last may outlast the moment announced by
  // what the awaited task takes.
  std::int64_t patience_ns(const Rank& rank) const {
    if (!plan_.waits()) return 0;
    return (1 + step_.num_chunks()) * rank.longest_ns + step_.slowest_ns();
  }

  Rank make_rank(std::int32_t number) const {
    Rank rank;
    // A user's order is taken from the user, the others from the plan.
    for (const Task& task : step_.options().order) {
      if (step_.rank_of(task.stage) == number) rank.order.push_back(task);
    }
    const HintOrder& hint = plan_.hint_order(number);
    for (std::int32_t at = 0; step_.options().order.empty() && at < hint.num_tasks(); ++at) {
      rank.order.push_back(plan_.table(number).task(hint.local_at(at)));
    }
    rank.position.assign(step_.num_tasks(), -1);
    std::int32_t units = 0, peak = 0;
    for (std::size_t at = 0; at < rank.order.size(); ++at) {
      rank.position[index(rank.order[at])] = static_cast<std::int32_t>(at);
      units += is_forward(rank.order[at]) ? 1 : gives_back(rank.order[at]) ? -1 : 0;
      peak = std::max(peak, units);
    }
    if (has_history_) rank.longest_ns = step_.slowest_ns();
    rank.is_claimed.assign(rank.order.size(), false);
    rank.held.assign(step_.num_microbatches(), 0);
    rank.forwards.assign(step_.num_microbatches(), 0);
    rank.bytes.assign(step_.num_microbatches(), 0);
    rank.limit = bytes_.applies()                  ? INT32_MAX
                 : !step_.options().limits.empty() ? step_.options().limits[number]
                 : slack_ == 0                   ? peak
                 : step_.num_chunks() == 1       ? step_.num_ranks()
                                                 : plan_.limit_units(number);
    return rank;
  }

  const RandomStep& step_;
  const StepPlan& plan_;
  const Schedule& schedule_;
  const bool has_history_;
  const ByteRule bytes_;
  const std::int32_t slack_;
  std::vector<std::int64_t> ready_ns_;  // by index()
};

}  // namespace rrfp::test
