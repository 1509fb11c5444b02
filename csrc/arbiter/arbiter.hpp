// Arbiter: from what is ready, the hint, the slack and the in-flight limit, picks the task a
// rank runs next. It reads no clock and no other state, so the runtime, the simulator and the
// tests drive the same code.
//
// Slack      how many hint positions a task may overtake. 0: the fixed order. kUnlimited: none
//            is held back. k: a forward may run only if its position is at most k beyond the
//            first position not yet claimed. Exempt, as the proof of deadlock freedom needs:
//            backward and weight-gradient tasks, and with several chunks the forwards of the
//            earliest microbatch (see Limit) once it has begun here.
// Limit      units in flight: taken when an F is claimed, given back when its B (split: its W)
//            is claimed. With free = limit - held and V chunks on the rank:
//            - unlimited slack, chains, weight gradients in any order ("levelled"): F of chunk c
//              needs free >= V - c;
//            - else ("earliest"): with e the earliest microbatch of the step's order whose
//              forwards have not all been claimed here, holding h units here, F of e needs
//              free >= 1 and any other F needs free >= (V - h) + 1.
//            Both are deadlock-free in every order of arrival. Under bounded slack (k >= 1)
//            that holds if the rank has one chunk and the hint runs forwards in the step's
//            microbatch order, which the plan checks.
//            A limit in bytes takes the place of units on its rank: see BytesInFlight. There only
//            the head of a class and the F of the earliest microbatch are looked at: letting a
//            smaller F pass a larger one would starve the larger.
// Slack 0    needs limit >= the order's own peak, checked when the step is planned; admission
//            then follows from the order.
// Rules      Forward prefers the lower chunk, backward the higher one, then the lower position.
//            W runs when the rule finds neither (kOrder: by position, like everything else).
//            kOrderThenWeight and kRoundsByPosition let the position decide between chunks too.
//            An F that is not admissible hides no other: a lower class, or under "earliest" the
//            F of e, may still run.
// Rounds     BF and FB alternate; a round that finds nothing for its second half is over. In an
//            agreement group (`rounds_by_claims`) only claims move the round: how often a member
//            looks in vain must not matter.
// In order   `weight_in_order`: what completes the parameter gradients of a stage (W, else B)
//            runs in the step's order of microbatches, stage by stage; likewise the F and the I
//            of the chunks that `forward_in_order` and `input_in_order` name. Such a class is
//            never blocked for the earliest microbatch, so "earliest" stays free of deadlock.
// Waiting    B and I start at once. Before an F or a W starts, an announced task that the rule
//            would take first (BF: and that stands before the F; a round alone would keep the F
//            from its turn) is waited for, if it is due within a share of what the F or W
//            usually takes; announced forwards count for a W only, and only if admissible. The
//            share shrinks where such Fs or Ws vary: kDoubt. A wait outlasts the moment that was
//            announced by what such tasks usually vary, times kGrace: else half of them would
//            come just after a long task has started. What is overdue then is ignored, so a wait
//            ends, and each task is waited for once.
//
// Threads    the rank's worker only (arrive() and announce() excepted).
// Progress   arrive() is wait-free, announce() lock-free; select() repeats only when an arrival
//            interferes (ReadySet).
// Bound      all memory is taken at construction.
// Edges      none of its own; arrive() to select() is ReadySet's R1 and R2, announce() to
//            select() PushList's P1.
// Lifetime   `table`, `order`, `times` and `memory` must outlive the arbiter.
// Cost       select(): O(log64 tasks) per class head, classes being kinds x chunks, and
//            O(log tasks) for the skip count. commit(): O(log tasks), amortised.
// Checked    tests/cpp/unit/arbiter_test.cc and arbiter_oracle_test.cc (brute-force twin),
//            model/admission_model.cc (no reachable deadlock).
#pragma once

#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

#include "arbiter/announcements.hpp"
#include "arbiter/bytes_in_flight.hpp"
#include "arbiter/claimed_positions.hpp"
#include "arbiter/hint_order.hpp"
#include "arbiter/ready_set.hpp"
#include "arbiter/task_times.hpp"

namespace rrfp {

inline constexpr std::int32_t kUnlimited = -1;

// Why select() found nothing: what the rank's idle time is booked under.
enum class Blocked : std::uint8_t {
  kNot,      // a task was chosen
  kInput,    // nothing that may run has all its inputs
  kLimit,    // a forward is ready, but the in-flight limit holds it back
  kSlack,    // a task is ready, but the hint (slack) puts another first
  kDone,     // every task has been claimed
  kHint,     // a task could run, but one that the hint puts first is due soon
  kAgreement,  // a task is ready here, but not yet at every member of the agreement group
};

enum class AdmissionRule : std::uint8_t { kLevelled, kEarliest };

struct ArbiterOptions {
  std::int32_t slack = kUnlimited;
  std::int32_t limit_units = kUnlimited;
  AdmissionRule admission = AdmissionRule::kLevelled;
  std::int64_t limit_bytes = kUnlimited;         // else limit_units is kUnlimited,
  std::vector<std::int64_t> forward_bytes = {};  // and these are the sizes, chunk by chunk
  bool units_returned = true;  // false for forward-only steps: no unit is taken at all
  bool weight_in_order = false;
  std::vector<bool> forward_in_order = {};  // by chunk; empty: none. Need weight_in_order
  std::vector<bool> input_in_order = {};
  bool rounds_by_claims = false;  // see Rounds
  // The share of its usual duration that an F, a W waits at most; 0: starts at once.
  double forward_patience = 0;
  double weight_patience = 0;

  bool waits() const { return forward_patience > 0 || weight_patience > 0; }
};

// See Waiting. By simulation; docs/simulation.md says what others are worth.
inline constexpr double kDoubt = 3;
inline constexpr double kGrace = 4;
inline constexpr double kMostGrace = 1;  // of the usual duration of what is waited for

struct Choice {
  std::int32_t local = -1;     // the task, or -1
  Blocked blocked = Blocked::kNot;
  std::int32_t overtaken = 0;  // unclaimed tasks that stand before it in the hint (skip count)
  std::int64_t wait_until_ns = 0;  // kHint: look again at this moment, or at an arrival
};

class Arbiter {
 public:
  // `place_of_microbatch[m]`: place of microbatch m in the step's order. `times` may be null
  // where options.waits() is false.
  Arbiter(const TaskTable& table, const HintOrder& order, const ArbiterOptions& options,
          const std::vector<std::int32_t>& place_of_microbatch, const TaskTimes* times = nullptr,
          std::pmr::memory_resource* memory = std::pmr::get_default_resource());

  // Any thread: all inputs of the task are there. False: it had arrived before.
  bool arrive(std::int32_t local);

  // Any thread: the task's input is being computed. False: it was announced before, or the
  // options do not wait.
  bool announce(const Announcement& announcement) { return announced_.announce(announcement); }

  // The task to run now, or why there is none. Changes nothing but the round (see Rounds).
  Choice select(std::int64_t now_ns = 0);

  // Claims what select() has just returned: moves units, positions and the round.
  void commit(const Choice& choice);

  // A task that another member has chosen, for commit(). -1: it is not ready here.
  Choice choice_of(std::int32_t local) const;

  // What select() has seen announced for the task, or null.
  const Announcement* announcement_of(std::int32_t local) const { return announced_.of(local); }

  // Whether the limit leaves room for a forward that has not been claimed.
  bool admits(std::int32_t local) const;

  // See StepEngine::prefetch(). prefetch_next() guesses the next task of a class, which it
  // returns (-1: there is none): the one behind as many as have been claimed.
  void prefetch(std::int32_t local) const;
  void prefetch_further(std::int32_t local) const {
    ready_.prefetch(table_.class_of(local), order_.index_in_class(local));
  }
  std::int32_t prefetch_next(std::int32_t task_class) const;

  std::int32_t units_held() const { return units_held_; }
  std::int32_t peak_units() const { return peak_units_; }
  std::int64_t peak_bytes() const { return bytes_.peak_bytes(); }  // 0 without a limit in bytes
  std::int32_t num_claimed() const { return claimed_.num_claimed(); }
  std::int32_t first_unclaimed_position() const { return claimed_.first_unclaimed(); }

 private:
  // What stood in the way of ready forwards during one select().
  struct HeldBack {
    bool by_limit = false;
    bool by_slack = false;
  };

  std::int32_t select_fixed();
  std::int32_t select_by_rule(HeldBack& held);
  std::int32_t best_by_position(HeldBack& held);
  std::int32_t best_forward(HeldBack& held);
  std::int32_t best_backward();
  std::int32_t best_weight_grad();

  // The moment until which `chosen` waits for a task that the hint puts first; 0: it starts now.
  std::int64_t wait_until_ns(std::int32_t chosen, std::int64_t now_ns);
  double most_wait_ns(std::int32_t chosen) const;  // until the announced moment
  std::int64_t due_ns(const Announcement& announcement) const;
  std::int64_t overdue_ns(const Announcement& announcement) const;
  bool would_precede(std::int32_t announced, std::int32_t chosen) const;

  // The forward of the class that the rank may claim, or -1.
  std::int32_t forward_of(std::int32_t task_class, HeldBack& held);
  std::int32_t head_of(std::int32_t task_class);  // heeds the order it keeps
  bool keeps_order(std::int32_t task_class) const;
  void sort_by_role();
  std::int32_t lower_position(std::int32_t local, std::int32_t other) const;
  TaskKind kind_of(std::int32_t local) const { return classes_[table_.class_of(local)].kind; }
  bool has_rounds() const {
    return order_.rule() == HintRule::kBackwardForward ||
           order_.rule() == HintRule::kRoundsByPosition;
  }
  bool position_decides() const {
    return order_.rule() == HintRule::kRoundsByPosition ||
           order_.rule() == HintRule::kOrderThenWeight;
  }
  bool is_ready(std::int32_t local) const;
  bool anything_ready();
  bool within_slack(std::int32_t local) const;
  std::int32_t free_units() const;
  void move_units(std::int32_t local);
  void move_earliest(std::int32_t microbatch, bool is_forward, std::int32_t taken);

  const TaskTable& table_;
  const HintOrder& order_;
  const ArbiterOptions options_;
  const TaskTimes* const times_;
  ReadySet<> ready_;
  ClaimedPositions claimed_;
  Announcements announced_;

  struct Class {
    TaskKind kind;
    bool keeps_order;  // runs in the step's order of microbatches
    std::int32_t chunk;
    std::int32_t next_place = 0;  // how many of it have been claimed
  };
  std::pmr::vector<Class> classes_;
  // Classes by role, in the order the rules prefer them: F, lower chunk first; B and I, higher
  // chunk first; W.
  std::pmr::vector<std::int32_t> by_role_;
  std::span<const std::int32_t> forward_classes_, backward_classes_, weight_classes_;

  bool second_half_ = false;  // BF, FB: the round has run its first half
  std::int32_t units_held_ = 0;
  std::int32_t peak_units_ = 0;

  // The earliest microbatch, by place in the step's order; kept where a rule asks for it.
  bool has_earliest_;
  struct Progress {
    std::int32_t forwards_claimed = 0;
    std::int32_t units_held = 0;
  };
  std::pmr::vector<std::int32_t> microbatch_at_place_;
  std::pmr::vector<Progress> progress_;         // by microbatch
  std::int32_t earliest_place_ = 0;             // num_microbatches: all forwards are claimed
  std::int32_t unfinished_place_ = 0;  // all before it have given their units back
  BytesInFlight bytes_;
};

}  // namespace rrfp
