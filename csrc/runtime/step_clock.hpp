// StepTimes and StepClock: where a step's wall time went on one rank. Every instant belongs to
// exactly one part, so the parts add up to the wall time.
// Threads  the rank's worker. Cost: one addition at each change.
#pragma once

#include <cstdint>

#include "arbiter/arbiter.hpp"

namespace rrfp {

// In ns; the parts add up to wall_ns.
struct StepTimes {
  std::int64_t wall_ns = 0;
  std::int64_t compute_ns = 0;      // between claim and retire
  std::int64_t idle_input_ns = 0;   // no task had all its inputs
  std::int64_t idle_limit_ns = 0;   // the in-flight limit held a ready forward back
  std::int64_t idle_slack_ns = 0;   // the hint put a task first that was not ready
  std::int64_t idle_agreement_ns = 0;  // another member of the agreement group was not ready
  std::int64_t host_ns = 0;         // between retire and the next claim: rrfp's own cost
};

class StepClock {
 public:
  void begin(std::int64_t now_ns) {
    times_ = {};
    part_ = &times_.host_ns;
    since_ns_ = now_ns;
  }
  void claimed(std::int64_t now_ns) { enter(times_.compute_ns, now_ns); }
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
  void enter(std::int64_t& part, std::int64_t now_ns) {
    const std::int64_t passed_ns = now_ns - since_ns_;
    *part_ += passed_ns;
    times_.wall_ns += passed_ns;
    since_ns_ = now_ns;
    part_ = &part;
  }

  StepTimes times_;
  std::int64_t* part_ = &times_.host_ns;
  std::int64_t since_ns_ = 0;
};

}  // namespace rrfp
