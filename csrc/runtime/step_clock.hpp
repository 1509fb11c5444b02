// StepTimes and StepClock: where a step's wall time went on one rank. Every instant belongs to
// exactly one part, so the parts add up to the wall time.
//
// Transfer A wait for inputs ends when a task can run. If its last input came from another rank,
//          the wait is split at the moment from which that input (and every other of the task)
//          was computed: before it the input was not computed yet, after it it was in transfer.
// Warm-up  What was not computed yet before the rank's first task: the pipeline fills. (A rank's
//          step is over with its last task: while it drains, it waits for inputs like any other.)
// Threads  the rank's worker. Cost: one addition at each change, two at the end of a wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "arbiter/arbiter.hpp"

namespace rrfp {

// In ns; the parts add up to wall_ns.
struct StepTimes {
  std::int64_t wall_ns = 0;
  std::int64_t compute_ns = 0;      // between claim and retire
  std::int64_t idle_warmup_ns = 0;  // before the first task: its inputs were not computed yet
  std::int64_t idle_input_ns = 0;   // no task had all its inputs: one was not computed yet
  std::int64_t idle_transfer_ns = 0;  // likewise, but they were computed and still on their way
  std::int64_t idle_limit_ns = 0;   // the in-flight limit held a ready forward back
  std::int64_t idle_slack_ns = 0;   // the hint put a task first that was not ready
  std::int64_t idle_agreement_ns = 0;  // another member of the agreement group was not ready
  std::int64_t host_ns = 0;         // between retire and the next claim: rrfp's own cost
  std::vector<std::int64_t> transfer_from_ns;  // idle_transfer_ns, by the rank that computed it
};

// Since when a task's inputs were all computed, the last to come by another rank.
struct Transfer {
  std::int64_t from_ns = 0;
  std::int32_t source_rank = -1;  // -1: it came from this rank, or nobody knows since when
};

class StepClock {
 public:
  void begin(std::int32_t num_ranks, std::int64_t now_ns) {
    std::vector<std::int64_t> by_rank = std::move(times_.transfer_from_ns);
    by_rank.assign(num_ranks, 0);
    times_ = {};
    times_.transfer_from_ns = std::move(by_rank);
    waits_.clear();
    has_claimed_ = false;
    part_ = &times_.host_ns;
    since_ns_ = now_ns;
  }
  void claimed(const Transfer& transfer, std::int64_t now_ns) {
    enter(times_.compute_ns, now_ns);
    for (const Wait& wait : waits_) {
      const std::int64_t moved_ns = wait.to_ns - std::max(wait.from_ns, transfer.from_ns);
      if (moved_ns <= 0 || transfer.source_rank < 0) continue;
      times_.idle_input_ns -= moved_ns;
      times_.idle_transfer_ns += moved_ns;
      times_.transfer_from_ns[transfer.source_rank] += moved_ns;
    }
    waits_.clear();
    if (!std::exchange(has_claimed_, true)) std::swap(times_.idle_warmup_ns, times_.idle_input_ns);
  }
  void retired(std::int64_t now_ns) { enter(times_.host_ns, now_ns); }
  void blocked(Blocked why, std::int64_t now_ns) {
    enter(why == Blocked::kLimit   ? times_.idle_limit_ns
          : why == Blocked::kAgreement ? times_.idle_agreement_ns
          : why == Blocked::kSlack || why == Blocked::kHint ? times_.idle_slack_ns
                                   : times_.idle_input_ns,
          now_ns);
  }
  const StepTimes& end(std::int64_t now_ns) {
    enter(times_.host_ns, now_ns);
    return times_;
  }

 private:
  struct Wait {  // for inputs, before the next claim
    std::int64_t from_ns = 0;
    std::int64_t to_ns = 0;
  };

  void enter(std::int64_t& part, std::int64_t now_ns) {
    const std::int64_t passed_ns = now_ns - since_ns_;
    if (part_ == &times_.idle_input_ns) {
      if (waits_.empty() || waits_.back().to_ns != since_ns_) waits_.push_back({since_ns_, now_ns});
      waits_.back().to_ns = now_ns;
    }
    *part_ += passed_ns;
    times_.wall_ns += passed_ns;
    since_ns_ = now_ns;
    part_ = &part;
  }

  StepTimes times_;
  std::int64_t* part_ = &times_.host_ns;
  std::int64_t since_ns_ = 0;
  bool has_claimed_ = false;  // in this step
  std::vector<Wait> waits_;  // of a wait that changes its cause, one each time
};

}  // namespace rrfp
