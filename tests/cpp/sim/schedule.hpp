// Schedule: what ran when, and from that alone, when each task could have run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "random_step.hpp"

namespace rrfp::test {

struct Schedule {
  bool finished = false;
  std::vector<std::vector<VirtualTask>> ranks;
  std::vector<std::int32_t> peak_units;
};

inline constexpr std::int64_t kNotReady = -1;

// When the last input of each task was there, by RandomStep::index(); kNotReady: never. `lost`:
// the task whose output did not arrive. Both inputs of a B or I must come.
inline std::vector<std::int64_t> ready_times(const RandomStep& step, const Schedule& schedule,
                                             const std::optional<Task>& lost) {
  const std::int32_t last = step.num_stages() - 1;
  std::vector<std::int64_t> ready_ns(step.num_tasks(), kNotReady);
  std::vector<std::int64_t> own_ns(step.num_tasks(), kNotReady);      // own F or I
  std::vector<std::int64_t> message_ns(step.num_tasks(), kNotReady);  // of the neighbour
  for (std::int32_t rank = 0; rank < step.num_ranks(); ++rank) {
    std::map<std::int32_t, std::int64_t> latest_ns;  // by the other rank
    for (const VirtualTask& ran : schedule.ranks[rank]) {
      const auto [stage, kind, m] = ran.task;
      if (kind == TaskKind::kWeightGrad) continue;
      if (kind == TaskKind::kForward) {
        own_ns[step.index({stage, TaskKind::kBackward, m})] = ran.end_ns;
        own_ns[step.index({stage, TaskKind::kInputGrad, m})] = ran.end_ns;
      }
      if (kind == TaskKind::kInputGrad) {
        own_ns[step.index({stage, TaskKind::kWeightGrad, m})] = ran.end_ns;
      }
      const std::int32_t target = kind == TaskKind::kForward ? stage + 1 : stage - 1;
      if (target < 0 || target > last || lost == ran.task) continue;
      std::int64_t at_ns = ran.end_ns;
      if (step.rank_of(target) != rank) {
        std::int64_t& link_ns = latest_ns[step.rank_of(target)];
        at_ns += step.latency_ns(ran.task);
        if (step.fifo_links()) at_ns = std::max(at_ns, link_ns);
        link_ns = std::max(link_ns, at_ns);
      }
      message_ns[step.index({target, kind, m})] = at_ns;
    }
  }
  for (std::int32_t stage = 0; stage <= last; ++stage) {
    for (std::int32_t m = 0; m < step.num_microbatches(); ++m) {
      for (const TaskKind kind : step.kinds()) {
        const std::size_t at = step.index({stage, kind, m});
        if (kind == TaskKind::kForward) {
          ready_ns[at] = stage == 0 ? 0 : message_ns[at];
        } else if (kind == TaskKind::kWeightGrad || stage == last) {
          ready_ns[at] = own_ns[at];
        } else if (own_ns[at] != kNotReady && message_ns[at] != kNotReady) {
          ready_ns[at] = std::max(own_ns[at], message_ns[at]);
        }
      }
    }
  }
  return ready_ns;
}

}  // namespace rrfp::test
