// AgreementLog: how the members of an agreement group come to run one order of tasks in one
// step, without a leader and without a message.
//
// Purpose  Members hold the same stage and meet in collectives inside a task, so all must run the
//          same tasks in the same order, although each sees its inputs come at other moments.
// Shape    Three arrays of words that all members share, one word per task or entry:
//
//            arrivals[task]   the set of members at which the task has arrived
//            ready[i]         the i-th task that had arrived at all of them
//            decided[k]       decision k: the k-th task that every member runs
//
//          Both logs are dense and are only appended to, each entry by one compare-and-swap on an
//          empty word: whoever loses finds the winner there. Decision k is proposed by whoever
//          needs it, from the entries of `ready` it has seen and the decisions before k; losers
//          adopt. No entry is ever half made, so a member that stalls anywhere hides nothing.
// Steps    A word carries the number of its step in its upper half; a word of another step is
//          empty. So nothing is cleared between steps, and a step uses the words of the step
//          before the last: its first decision needs arrivals of all members in that step, which
//          they make when they have left the step before, so nobody reads the old words any more.
// Threads  arrive(): any threads of the member, a task once. absentees(): any. The rest: the
//          member's worker.
// Progress lock-free: a lost compare-and-swap means that another member's has succeeded. At most
//          num_members attempts in arrive(), and as many entries passed as others have made.
// Bound    one word per task in each array; memory is the caller's.
//
// Ordering edges (cited where they are used)
//   L1  arrive()'s CAS on arrivals[task] acquires and releases. The member that completes the
//       set has acquired what every other wrote before its own arrival there.
//   L2  The CAS that appends to `ready` releases, next_ready() acquires: with L1, a worker that
//       sees a task there also sees the inputs its own threads had stored before arrive().
//   L3  The CAS on decided[k] releases, and acquires where it loses; adopted() acquires. Who
//       sees decision k also sees the entry of `ready` that its proposer had seen.
//   L4  first_empty_ is a lower bound of the end of `ready`, private to the member: relaxed, a
//       stale value costs looks and no more.
//
// Lifetime The words outlive the log. Zeroed memory is empty; step numbers start at 0.
// Cost     one CAS per arrival, one per entry of each log, by whoever makes it; a load per entry
//          for everybody else.
// Checked  tests/cpp/model/agreement_model.cc (members that stall or die anywhere),
//          stress/agreement_stress.cc (TSan), sim/agreement_sim.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/check.hpp"

namespace rrfp {

using AgreementWord = std::uint64_t;

inline constexpr std::int32_t kMaxAgreementMembers = 32;  // a bit each in half a word

template <template <class> class Atom>
struct AgreementWords {
  Atom<AgreementWord>* arrivals = nullptr;
  Atom<AgreementWord>* ready = nullptr;
  Atom<AgreementWord>* decided = nullptr;
};

// The steps that matter, a template argument so that tests can weaken one at a time.
template <template <class> class Atom>
struct AgreementSteps {
  // Adds `bit` to the set in `word`; what the set was before.
  static std::uint32_t join(Atom<AgreementWord>& word, std::uint32_t step, std::uint32_t bit) {
    AgreementWord before = word.load(std::memory_order_relaxed);  // checked by the CAS
    while (true) {
      const std::uint32_t members = value_of(before, step);
      if (word.compare_exchange_strong(before, make(step, members | bit),
                                       std::memory_order_acq_rel,     // L1
                                       std::memory_order_relaxed)) {  // tried again
        return members;
      }
    }
  }

  // Fills the word if it is empty; what is there afterwards.
  static std::uint32_t fill(Atom<AgreementWord>& word, std::uint32_t step, std::uint32_t value) {
    AgreementWord before = word.load(std::memory_order_acquire);  // L2, L3
    while (value_of(before, step) == 0) {
      if (word.compare_exchange_strong(before, make(step, value),
                                       std::memory_order_acq_rel,     // L2, L3
                                       std::memory_order_acquire)) {  // L3: the winner's
        return value;
      }
    }
    return value_of(before, step);
  }

  static std::uint32_t read(const Atom<AgreementWord>& word, std::uint32_t step) {
    return value_of(word.load(std::memory_order_acquire), step);  // L2, L3
  }

  // 0: the word is empty, or of another step.
  static std::uint32_t value_of(AgreementWord word, std::uint32_t step) {
    return (word >> 32) == step + std::uint64_t{1} ? static_cast<std::uint32_t>(word) : 0;
  }
  static AgreementWord make(std::uint32_t step, std::uint32_t value) {
    return (step + std::uint64_t{1}) << 32 | value;
  }
};

template <template <class> class Atom = std::atomic, class Steps = AgreementSteps<Atom>>
class AgreementLog {
 public:
  AgreementLog(const AgreementWords<Atom>& words, std::int32_t num_tasks, std::int32_t member,
               std::int32_t num_members, std::uint32_t step)
      : words_(words),
        num_tasks_(num_tasks),
        own_bit_(std::uint32_t{1} << member),
        all_bits_(static_cast<std::uint32_t>((std::uint64_t{1} << num_members) - 1)),
        step_(step) {
    RRFP_INVARIANT(num_members >= 1 && num_members <= kMaxAgreementMembers && member >= 0 &&
                       member < num_members,
                   "an agreement group has a member outside it");
  }

  // All inputs of the task are at this member. True: with this it has arrived at all of them.
  bool arrive(std::int32_t task) {
    const std::uint32_t before = Steps::join(words_.arrivals[task], step_, own_bit_);
    if ((before & own_bit_) != 0 || (before | own_bit_) != all_bits_) return false;
    append_ready(task);
    return true;
  }

  // Members at which the task has not arrived, one bit each.
  std::uint32_t absentees(std::int32_t task) const {
    return all_bits_ & ~Steps::read(words_.arrivals[task], step_);
  }

  // The next entry of the ready log that this worker has not taken; -1: there is none yet.
  std::int32_t next_ready() {
    if (num_read_ == num_tasks_) return -1;
    const std::uint32_t entry = Steps::read(words_.ready[num_read_], step_);
    if (entry == 0) return -1;
    ++num_read_;
    return static_cast<std::int32_t>(entry) - 1;
  }

  // The decision this worker needs next, if it has been made; -1: not yet.
  std::int32_t adopted() {
    if (num_decided_ == num_tasks_) return -1;
    const std::uint32_t entry = Steps::read(words_.decided[num_decided_], step_);
    if (entry == 0) return -1;
    ++num_decided_;
    return static_cast<std::int32_t>(entry) - 1;
  }

  // Proposes that decision; answers what has been decided, by this member or another.
  std::int32_t propose(std::int32_t task) {
    RRFP_INVARIANT(num_decided_ < num_tasks_, "a decision was proposed after the last");
    const std::uint32_t entry = Steps::fill(words_.decided[num_decided_], step_,
                                            static_cast<std::uint32_t>(task) + 1);
    ++num_decided_;
    return static_cast<std::int32_t>(entry) - 1;
  }

  std::int32_t num_read() const { return num_read_; }
  std::int32_t num_decided() const { return num_decided_; }  // adopted or proposed here

 private:
  void append_ready(std::int32_t task) {
    const std::uint32_t entry = static_cast<std::uint32_t>(task) + 1;
    auto at = static_cast<std::int32_t>(first_empty_.load(std::memory_order_relaxed));  // L4
    while (Steps::fill(words_.ready[at], step_, entry) != entry) {
      ++at;
      RRFP_INVARIANT(at < num_tasks_, "the ready log of an agreement group is full");
    }
    first_empty_.store(static_cast<std::uint64_t>(at), std::memory_order_relaxed);  // L4
  }

  AgreementWords<Atom> words_;
  std::int32_t num_tasks_;
  std::uint32_t own_bit_;
  std::uint32_t all_bits_;
  std::uint32_t step_;
  Atom<std::uint64_t> first_empty_{};  // L4
  // The worker's.
  std::int32_t num_read_ = 0;
  std::int32_t num_decided_ = 0;
};

}  // namespace rrfp
