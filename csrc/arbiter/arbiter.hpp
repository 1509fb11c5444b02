// Arbiter: from what is ready, the hint, the slack and the in-flight limit, picks the task a
// rank runs next. It reads no clock and no other state, so the runtime, the simulator and the
// tests drive the same code.
//
// Slack      how many hint positions a task may overtake. 0: the fixed order. kUnlimited: none
//            is held back. k: a forward may run only if its position is at most k beyond the
//            first position not yet claimed; backward and weight-gradient tasks are exempt,
//            as the proof of deadlock freedom needs.
// Limit      units in flight: taken when an F is claimed, given back when its B (split: its W)
//            is claimed. With free = limit - held and V chunks on the rank:
//            - unlimited slack, chains, W free ("levelled"): F of chunk c needs free >= V - c;
//            - else ("earliest"): with e the earliest microbatch of the step's order whose
//              forwards have not all been claimed here, holding h units here, F of e needs
//              free >= 1 and any other F needs free >= (V - h) + 1.
//            Both are deadlock-free for every hint and arrival order (docs/concepts.md).
// Slack 0    needs limit >= the order's own peak, checked when the step is planned; admission
//            then follows from the order.
// Rounds     BF and FB alternate; a round that finds nothing for its second half is over.
//
// Threads    the rank's worker only (ReadySet::arrive excepted).
// Cost       O(log64 tasks) per class head; classes are kinds x chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "arbiter/hint_order.hpp"
#include "arbiter/ready_set.hpp"

namespace rrfp {

inline constexpr std::int32_t kUnlimited = -1;

// Why select() found nothing: what the rank's idle time is booked under.
enum class Blocked : std::uint8_t {
  kNot,      // a task was chosen
  kInput,    // nothing that may run has all its inputs
  kLimit,    // a forward is ready, but the in-flight limit holds it back
  kSlack,    // a task is ready, but the hint (slack) puts another first
  kDone,     // every task has been claimed
};

enum class AdmissionRule : std::uint8_t { kLevelled, kEarliest };

struct ArbiterOptions {
  std::int32_t slack = kUnlimited;
  std::int32_t limit_units = kUnlimited;
  AdmissionRule admission = AdmissionRule::kLevelled;
  bool units_returned = true;  // false for forward-only steps: no unit is taken at all
};

struct Choice {
  std::int32_t local = -1;     // the task, or -1
  Blocked blocked = Blocked::kNot;
  std::int32_t overtaken = 0;  // unclaimed tasks that stand before it in the hint (skip count)
};

class Arbiter {
 public:
  // `place_of_microbatch[m]`: place of microbatch m in the step's order.
  Arbiter(const TaskTable& table, const HintOrder& order, const ArbiterOptions& options,
          std::vector<std::int32_t> place_of_microbatch);

  // Any thread: all inputs of the task are there. False: it had arrived before.
  bool arrive(std::int32_t local);

  // The task to run now, or why there is none. Changes nothing but the round (see Rounds).
  Choice select();

  // Claims what select() has just returned: moves units, positions and the round.
  void commit(const Choice& choice);

  std::int32_t units_held() const;
  std::int32_t peak_units() const;
  std::int32_t num_claimed() const;
  std::int32_t first_unclaimed_position() const;  // num_tasks when all are claimed
};

}  // namespace rrfp
