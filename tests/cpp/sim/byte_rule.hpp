// Admission where limits are in bytes, worked out anew from what a rank holds; here all ranks of a
// step count bytes, or none does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "random_step.hpp"

namespace rrfp::test {

// How often forwards were admitted by each rule, and how often one was ready and held back.
struct AdmissionCounts {
  std::int64_t levelled = 0, earliest = 0, not_earliest = 0;
  std::int64_t levelled_held = 0, not_earliest_held = 0;
  std::int64_t bytes = 0, bytes_held = 0;
};

class ByteRule {
 public:
  ByteRule(const RandomStep& step, const StepPlan& plan) : step_(step), plan_(plan) {}

  bool applies() const { return !step_.options().limits_bytes.empty(); }
  std::int64_t size(const Task& task) const {
    return step_.options().activation_bytes[task.stage][task.microbatch];
  }

  // Whether the forward fits beside what its rank holds by microbatch: tasks in flight, and their
  // bytes. `kept`: the earliest microbatch that has forwards left there.
  bool fits(const std::vector<std::int32_t>& held, const std::vector<std::int64_t>& bytes,
            const Task& task, std::int32_t kept) const {
    const std::int32_t rank = step_.rank_of(task.stage);
    std::int64_t free = step_.options().limits_bytes[rank], most = 0;
    bool is_first = task.microbatch == kept;  // and nothing before it is in flight
    for (std::int32_t m = 0; m < step_.num_microbatches(); ++m) {
      std::int64_t total = 0;
      for (std::int32_t stage = 0; stage < step_.num_stages(); ++stage) {
        if (step_.rank_of(stage) == rank) total += size({stage, TaskKind::kForward, m});
      }
      most = std::max(most, total);
      free -= bytes[m];
      is_first &= m == kept || held[m] == 0 || !precedes(m, kept);
    }
    const std::int64_t room = task.microbatch == kept ? 0 : most - bytes[kept];
    return is_first || free >= size(task) + room;
  }

  // Whether the forward at a position must not pass another of its stage; `was_ready(position)`:
  // that task stood ready.
  template <class WasReady>
  bool is_behind(const std::vector<Task>& order, std::size_t at, std::int32_t kept,
                 WasReady was_ready) const {
    const Task& task = order[at];
    if (!applies() || task.kind != TaskKind::kForward || task.microbatch == kept) return false;
    for (std::size_t before = 0; before < at; ++before) {
      const Task& other = order[before];
      if (other.kind == task.kind && other.stage == task.stage && was_ready(before)) return true;
    }
    return false;
  }

 private:
  bool precedes(std::int32_t m, std::int32_t other) const {
    const auto& order = plan_.microbatch_order();
    return std::find(order.begin(), order.end(), m) < std::find(order.begin(), order.end(), other);
  }

  const RandomStep& step_;
  const StepPlan& plan_;
};

}  // namespace rrfp::test
