// Judges how ranks say that they spent a step, from what was run and when, and from nothing else:
// the parts add up, and what counts as transfer is waiting for a message that had been computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/step_clock.hpp"
#include "schedule.hpp"

namespace rrfp::test {

class IdleChecker {
 public:
  static inline std::int64_t num_exact = 0;  // steps judged to the microsecond

  // A chain in which every message came. By rank; `clocks_are_measured`: before the step began.
  IdleChecker(const RandomStep& step, const Schedule& schedule, bool clocks_are_measured)
      : step_(step), schedule_(schedule), clocks_are_measured_(clocks_are_measured),
        end_ns_(step.num_tasks(), 0) {
    for (const auto& ran : schedule.ranks) {
      for (const VirtualTask& task : ran) end_ns_[step.index(task.task)] = task.end_ns;
    }
  }

  std::string verdict(const std::vector<StepTimes>& times) const {
    for (std::int32_t rank = 0; rank < step_.num_ranks(); ++rank) {
      const std::string wrong = check_rank(rank, times[rank]);
      if (!wrong.empty()) return wrong + " on rank " + std::to_string(rank);
    }
    num_exact += clocks_are_measured_;
    return "";
  }

 private:
  std::string check_rank(std::int32_t rank, const StepTimes& times) const {
    std::int64_t busy_ns = 0, idle_ns = 0, transfer_ns = 0, free_from_ns = 0;
    for (const VirtualTask& ran : schedule_.ranks[rank]) {
      busy_ns += ran.end_ns - ran.start_ns;
      idle_ns += ran.start_ns - free_from_ns;
      const std::int64_t computed_ns = inputs_computed_ns(rank, ran.task);
      transfer_ns += std::max<std::int64_t>(
          0, ran.start_ns - std::max(free_from_ns, computed_ns));
      free_from_ns = ran.end_ns;
    }
    const std::int64_t other_ns =
        times.idle_limit_ns + times.idle_slack_ns + times.idle_agreement_ns;
    std::int64_t from_ranks_ns = 0;
    for (const std::int64_t ns : times.transfer_from_ns) from_ranks_ns += ns;
    if (times.compute_ns != busy_ns) return "the compute time is not that of its tasks";
    if (times.idle_warmup_ns + times.idle_input_ns + times.idle_transfer_ns + other_ns !=
            idle_ns || times.wall_ns != busy_ns + idle_ns) {
      return "the parts of the idle time do not add up";
    }
    if (times.idle_warmup_ns > schedule_.ranks[rank].front().start_ns) {
      return "it warmed up for longer than until its first task";
    }
    if (from_ranks_ns != times.idle_transfer_ns || times.transfer_from_ns[rank] != 0) {
      return "the transfers by rank do not add up";
    }
    if (times.idle_transfer_ns > transfer_ns) return "more transfer than messages were under way";
    // A header says when to the microsecond, rounded up. What lies under another cause stays there.
    const auto rounded_ns = static_cast<std::int64_t>(1000 * schedule_.ranks[rank].size());
    if (clocks_are_measured_ && times.idle_transfer_ns < transfer_ns - rounded_ns - other_ns) {
      return "waiting for a message counts as waiting for it to be computed";
    }
    return "";
  }

  // When the inputs of the task had been computed; kNever: its last one was not another rank's.
  std::int64_t inputs_computed_ns(std::int32_t rank, const Task& task) const {
    const auto [stage, kind, m] = task;
    const std::int32_t source = kind == TaskKind::kForward ? stage - 1 : stage + 1;
    const bool is_remote = kind != TaskKind::kWeightGrad && source >= 0 &&
                           source < step_.num_stages() && step_.rank_of(source) != rank;
    return is_remote ? end_ns_[step_.index({source, kind, m})] : kNever;
  }

  const RandomStep& step_;
  const Schedule& schedule_;
  const bool clocks_are_measured_;
  std::vector<std::int64_t> end_ns_;  // by RandomStep::index()
};

}  // namespace rrfp::test
