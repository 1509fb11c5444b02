// Decision: one task that a rank chose, as reports show it. DecisionLog: the last of them.
//
// Threads  add(): the rank's worker. last(): any thread.
// Progress both wait-free: a reader leaves out what is written over while it reads, so one that
//          is overtaken by kKept decisions meanwhile sees none.
// Bound    kKept decisions, in the object itself.
// Edges    D1  add() stores a decision's words with release, then count_ with release. last()
//              acquires count_, then the words, then reads count_ again. A word of a later
//              decision brings with it the count of those before that, so a decision that was
//              torn counts as too old the second time.
// Cost     add(): six stores.
// Checked  tests/cpp/unit/decision_log_test.cc, tests/cpp/stress/decision_log_stress.cc (TSan).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "base/task.hpp"

namespace rrfp {

inline constexpr std::int32_t kShownDecisions = 32;

// Little-endian on the wire, exactly as here.
struct Decision {
  std::int64_t at_ns = 0;               // on the wire: how long before
  std::uint32_t step = 0;
  std::int32_t stage = -1;
  std::int32_t microbatch = -1;
  std::int32_t overtaken = 0;           // tasks not yet chosen that the hint puts before it
  std::int32_t passed_stage = -1;       // the first of those; -1: none
  std::int32_t passed_microbatch = -1;
  std::int32_t lacks_stage = -1;        // whose message that one lacked; -1: nobody's
  TaskKind kind = TaskKind::kForward;
  TaskKind passed_kind = TaskKind::kForward;
  // Why it was passed over. kInput with lacks_stage -1: its own F or I has not run. kNot: it
  // could have run, and the rule puts the kind of the chosen one first.
  Blocked passed_why = Blocked::kNot;
  std::uint8_t reserved = 0;
};
static_assert(sizeof(Decision) == 40);

class DecisionLog {
 public:
  static constexpr std::int32_t kKept = 64;  // more than are shown: some are being written over

  void add(const Decision& decision);
  // At most kShownDecisions, the oldest first.
  std::vector<Decision> last() const;

 private:
  using Words = std::array<std::uint64_t, sizeof(Decision) / sizeof(std::uint64_t)>;

  std::atomic<std::uint64_t> count_{0};  // D1
  std::array<std::array<std::atomic<std::uint64_t>, std::tuple_size_v<Words>>, kKept> words_{};
};

// How long before now_ns; a decision may be newer than the look at the clock.
std::int64_t ago_ns(const Decision& decision, std::int64_t now_ns);

// "step 4: 1F2 0.31 before 1B0 (lacks stage 2), 1B0 0.02": seconds before now_ns, the oldest first.
std::string decisions_text(std::span<const Decision> decisions, std::int64_t now_ns);
// "lacks stage 2", "is held back by the in-flight limit", ...
std::string passed_text(const Decision& decision);

// Appends them to a message, with how long ago they were; the inverse: false when malformed.
void append_decisions(std::span<const Decision> decisions, std::int64_t now_ns,
                      std::vector<std::byte>* body);
bool parse_decisions(std::span<const std::byte> body, std::int64_t now_ns,
                     std::vector<Decision>* decisions);

}  // namespace rrfp
