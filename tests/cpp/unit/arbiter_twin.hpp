// A brute-force twin of the arbiter, written from the definitions: sets of positions, a full scan
// per decision. It shares no code with the arbiter but the names of options and reasons.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "arbiter/arbiter.hpp"

namespace rrfp::test {

struct Setting {
  std::int32_t num_chunks, num_microbatches;
  std::vector<TaskKind> kinds;
  HintRule rule;
  std::vector<Task> order;
  ArbiterOptions options;
  std::vector<std::int32_t> places;  // by microbatch
};

inline bool gives_back(TaskKind kind) {
  return kind == TaskKind::kBackward || kind == TaskKind::kWeightGrad;
}

class Twin {
 public:
  explicit Twin(const Setting& setting) : s_(setting) {}

  std::set<std::int32_t> ready, claimed;  // positions

  struct Answer {
    std::int32_t position;
    Blocked blocked;
  };

  Answer answer() {
    Answer found = round(open_);
    if (found.position < 0 && open_) found = round(open_ = false);
    return found;
  }

  void claim(std::int32_t position) {
    ready.erase(position);
    claimed.insert(position);
    const TaskKind kind = s_.order[position].kind;
    const bool forward = kind == TaskKind::kForward;
    const bool backward = kind == TaskKind::kBackward || kind == TaskKind::kInputGrad;
    open_ = ((s_.rule == HintRule::kBackwardForward || s_.rule == HintRule::kRoundsByPosition) &&
             backward) ||
            (s_.rule == HintRule::kForwardBackward && forward);
    peak = std::max(peak, held());
  }

  std::int32_t held(std::int32_t microbatch = -1) const {
    std::int32_t units = 0;
    for (const std::int32_t p : claimed) {
      if (microbatch >= 0 && s_.order[p].microbatch != microbatch) continue;
      units += s_.order[p].kind == TaskKind::kForward ? 1 : 0;
      units -= gives_back(s_.order[p].kind) ? 1 : 0;
    }
    return s_.options.units_returned ? units : 0;
  }

  std::int32_t first_unclaimed() const {
    std::int32_t p = 0;
    while (claimed.count(p) != 0) ++p;
    return p;
  }

  std::int32_t peak = 0;

 private:
  // The best of the ready tasks that may run, when the round stands in its second half or not.
  Answer round(bool second_half) const {
    if (claimed.size() == s_.order.size()) return {-1, Blocked::kDone};
    std::map<std::tuple<int, std::int32_t, std::int32_t>, std::int32_t> best;
    bool limit = false, slack = false;
    const std::int32_t first = first_unclaimed(), kept = earliest();
    for (const std::int32_t p : ready) {
      const bool forward = s_.order[p].kind == TaskKind::kForward;
      if (s_.options.slack == 0
              ? p != first
              : must_wait_for_place(s_.order[p]) ||
                    (forward && s_.options.slack > 0 && p > first + s_.options.slack &&
                     !has_begun_earliest(s_.order[p], kept))) {
        slack = true;
      } else if (forward && is_behind(p, kept)) {
        continue;
      } else if (forward && s_.options.slack != 0 && !admitted(s_.order[p], kept)) {
        limit = true;
      } else {
        best[preference(p, second_half)] = p;
      }
    }
    if (!best.empty()) return {best.begin()->second, Blocked::kNot};
    return {-1, limit ? Blocked::kLimit : slack ? Blocked::kSlack : Blocked::kInput};
  }

  std::tuple<int, std::int32_t, std::int32_t> preference(std::int32_t p, bool second) const {
    const Task& task = s_.order[p];
    if (s_.rule == HintRule::kOrder || s_.options.slack == 0) return {0, 0, p};
    if (task.kind == TaskKind::kWeightGrad) return {2, 0, p};
    if (s_.rule == HintRule::kOrderThenWeight) return {0, 0, p};
    const bool forward = task.kind == TaskKind::kForward;
    bool forward_leads = s_.rule == HintRule::kForwardPriority;
    const bool by_position = s_.rule == HintRule::kRoundsByPosition;
    if (s_.rule == HintRule::kBackwardForward || by_position) forward_leads = second;
    if (s_.rule == HintRule::kForwardBackward) forward_leads = !second;
    const std::int32_t chunk = by_position ? 0 : forward ? task.stage : -task.stage;
    return {forward == forward_leads ? 0 : 1, chunk, p};
  }

  bool has_begun_earliest(const Task& task, std::int32_t earliest) const {
    return task.microbatch == earliest &&
           std::any_of(claimed.begin(), claimed.end(), [&](std::int32_t p) {
             return s_.order[p].microbatch == earliest && s_.order[p].kind == TaskKind::kForward;
           });
  }

  // Whether another of its kind and stage comes first in the step's order, where that is kept.
  bool must_wait_for_place(const Task& task) const {
    const auto& forwards = s_.options.forward_in_order;
    const auto& inputs = s_.options.input_in_order;
    const bool kept = gives_back(task.kind) ? s_.options.weight_in_order
                      : task.kind == TaskKind::kForward
                          ? !forwards.empty() && forwards[task.stage]
                          : !inputs.empty() && inputs[task.stage];
    if (!kept) return false;
    for (std::size_t p = 0; p < s_.order.size(); ++p) {
      const Task& other = s_.order[p];
      if (other.kind == task.kind && other.stage == task.stage &&
          s_.places[other.microbatch] < s_.places[task.microbatch] &&
          claimed.count(static_cast<std::int32_t>(p)) == 0) {
        return true;
      }
    }
    return false;
  }

  // Units, or bytes as each forward has them, of the tasks that have been claimed.
  std::int64_t bytes_of(std::int32_t microbatch) const {
    std::int64_t bytes = 0;
    for (const std::int32_t p : claimed) {
      const Task& task = s_.order[p];
      if (microbatch >= 0 && task.microbatch != microbatch) continue;
      if (task.kind == TaskKind::kForward) bytes += size(task);
      if (gives_back(task.kind)) bytes -= size(task);
    }
    return bytes;
  }
  std::int64_t size(const Task& task) const {
    return s_.options.forward_bytes[task.stage * s_.num_microbatches + task.microbatch];
  }

  bool fits(const Task& task, std::int32_t earliest) const {
    std::int64_t reserve = 0;
    bool others_hold = false;  // of those before the earliest
    for (std::int32_t m = 0; m < s_.num_microbatches; ++m) {
      std::int64_t total = 0;
      for (std::int32_t c = 0; c < s_.num_chunks; ++c) total += size({c, TaskKind::kForward, m});
      reserve = std::max(reserve, total);
      others_hold |= s_.places[m] < s_.places[earliest] && held(m) != 0;
    }
    const std::int64_t free = s_.options.limit_bytes - bytes_of(-1);
    if (task.microbatch != earliest) return free >= size(task) + reserve - bytes_of(earliest);
    return !others_hold || free >= size(task);
  }

  // Limits in bytes: whether it stands behind another ready forward of its stage.
  bool is_behind(std::int32_t position, std::int32_t earliest) const {
    const Task& task = s_.order[position];
    if (s_.options.limit_bytes < 0 || task.microbatch == earliest) return false;
    return std::any_of(ready.begin(), ready.end(), [&](std::int32_t p) {
      return p < position && s_.order[p].kind == task.kind && s_.order[p].stage == task.stage &&
             !must_wait_for_place(s_.order[p]);
    });
  }

  bool admitted(const Task& task, std::int32_t earliest) const {
    if (s_.options.limit_bytes >= 0) return fits(task, earliest);
    if (s_.options.limit_units < 0) return true;
    const std::int32_t free = s_.options.limit_units - held();
    if (s_.options.admission == AdmissionRule::kLevelled) return free >= s_.num_chunks - task.stage;
    return free >= (task.microbatch == earliest ? 1 : s_.num_chunks - held(earliest) + 1);
  }

  // The microbatch of the lowest place that has forwards left; -1: none has.
  std::int32_t earliest() const {
    std::map<std::int32_t, std::int32_t> forwards;
    for (const std::int32_t p : claimed) {
      forwards[s_.order[p].microbatch] += s_.order[p].kind == TaskKind::kForward;
    }
    std::map<std::int32_t, std::int32_t> left;  // by place
    for (std::int32_t m = 0; m < s_.num_microbatches; ++m) {
      if (forwards[m] < s_.num_chunks) left[s_.places[m]] = m;
    }
    return left.empty() ? -1 : left.begin()->second;
  }

  const Setting& s_;
  bool open_ = false;  // a round has run its first half
};

}  // namespace rrfp::test
