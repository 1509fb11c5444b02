// A host and a device on a virtual clock that a LaunchPacer paces.
#pragma once

#include <algorithm>

#include "check.hpp"
#include "runtime/launch_pacer.hpp"

namespace rrfp::test {

inline constexpr TaskKind kF = TaskKind::kForward;
inline constexpr TaskKind kB = TaskKind::kBackward;
inline constexpr std::int64_t kAhead = LaunchPacer::kAheadNs;
inline constexpr std::int64_t kHeld = LaunchPacer::kNotBeforeAnEnd;

inline constexpr std::int32_t kMany = 1000;  // more than a case runs

inline TaskTable forwards_only(std::int32_t num = kMany) { return TaskTable({0}, {kF}, num); }
inline TaskTable both_kinds() { return TaskTable({0}, {kF, kB}, kMany); }

// A host that turns to each task when it may choose, and looks all the time: every end is seen
// at once. Tasks and launches take what the test says; the device begins when the launch is over.
struct Rank {
  explicit Rank(Lookahead lookahead, const TaskTable& table = forwards_only()) : pacer(1) {
    pacer.begin_step(table, lookahead);
  }

  // One task; answers the moment from which the one after it may be chosen, as soon as that is
  // known, with this task as the only unfinished one.
  std::int64_t run(std::int64_t launch_ns, std::int64_t device_ns, TaskKind kind = kF) {
    choose();
    pacer.claimed(kind, 0, now_ns, false);
    now_ns += launch_ns;
    pacer.launched(now_ns);
    begins_ns = std::max(now_ns, ends_ns);
    const std::int64_t end_before_ns = ends_ns;
    ends_ns = begins_ns + device_ns;
    if (end_before_ns > now_ns) {
      pacer.look(now_ns, 2);
      CHECK(pacer.choose_from_ns() == kHeld);
      pacer.look(end_before_ns, 2);  // the last look that does not see the end
      now_ns = end_before_ns;
    }
    pacer.look(now_ns, 1);
    return pacer.choose_from_ns();
  }

  // To the moment at which the next task may be chosen: an end, or what run() answered.
  void choose() {
    if (chooses_at_once || pacer.num_unfinished() == 0) return;
    const bool is_early = pacer.choose_from_ns() < ends_ns;
    now_ns = is_early ? std::max(now_ns, pacer.choose_from_ns()) : ends_ns;
    pacer.look(now_ns, 1);
    if (!is_early) pacer.look(now_ns, 0);
    CHECK(pacer.may_choose(now_ns));
  }

  LaunchPacer pacer;
  bool chooses_at_once = false;  // whatever the pacer says
  std::int64_t now_ns = 1'000'000;
  std::int64_t begins_ns = 0, ends_ns = 0;  // of the task launched last
};

// Learns that a task takes 1,000,000 and a launch 100,000, without variation.
inline void learn(Rank& rank, TaskKind kind = kF) {
  for (int i = 0; i < 60; ++i) rank.run(100'000, 1'000'000, kind);
}

}  // namespace rrfp::test
