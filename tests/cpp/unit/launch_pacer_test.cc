// LaunchPacer on a virtual clock: from which instant the next task may be chosen.
//
// Each case was seen to fail on its mutant of launch_pacer.cc:
//   - two unfinished tasks hold back nothing ............ two_unfinished_hold_everything_back
//   - kNone is kJit, kEager is kJit ..................... without_look_ahead..., eager_chooses...
//   - no kAheadNs, as long as all tasks are alike ....... just_in_time_to_the_nanosecond
//   - the longest task, the longest launch, the last one  what_varies_is_chosen_earlier
//   - the cheapest launch counts, or those of old steps . the_dearest_launch_of_the_step_counts
//   - what is not known counts as nothing ............... a_launch_that_is_not_known_may_be_dear
//   - the last tasks wait for their turn ................ what_is_left_without_a_choice...
#include <algorithm>
#include <random>
#include <vector>

#include "unit/launch_pacer_rank.hpp"

using namespace rrfp;
using namespace rrfp::test;

TEST_CASE(what_is_unknown_is_chosen_at_once) {
  Rank rank(Lookahead::kJit);
  CHECK(rank.run(100'000, 1'000'000) <= rank.now_ns);
}

TEST_CASE(two_unfinished_hold_everything_back) {
  for (const Lookahead lookahead : {Lookahead::kEager, Lookahead::kJit}) {
    Rank rank(lookahead);
    rank.run(100'000, 1'000'000);
    rank.pacer.claimed(kF, 0, rank.now_ns, false);
    rank.pacer.launched(rank.now_ns + 100'000);
    CHECK(rank.pacer.choose_from_ns() == kHeld);
    CHECK(!rank.pacer.may_choose(rank.now_ns + 1'000'000'000));
  }
}

TEST_CASE(without_look_ahead_the_device_must_be_idle) {
  Rank rank(Lookahead::kNone);
  for (int i = 0; i < 20; ++i) {
    CHECK(rank.run(100'000, 1'000'000) == kHeld);
    CHECK(rank.begins_ns == rank.now_ns);
  }
}

TEST_CASE(eager_chooses_when_the_one_before_has_ended) {
  Rank rank(Lookahead::kEager);
  for (int i = 0; i < 20; ++i) {
    CHECK(rank.run(100'000, 1'000'000) <= rank.now_ns);
    CHECK(rank.now_ns == rank.begins_ns);
  }
}

TEST_CASE(just_in_time_to_the_nanosecond) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  for (int i = 0; i < 20; ++i) {
    const std::int64_t due_ns = rank.run(100'000, 1'000'000);
    CHECK(due_ns == rank.ends_ns - 100'000 - kAhead);
    CHECK(!rank.pacer.may_choose(due_ns - 1) && rank.pacer.may_choose(due_ns));
  }
}

TEST_CASE(an_end_before_its_time_lets_choose_at_once) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  const std::int64_t due_ns = rank.run(100'000, 300'000);
  rank.pacer.look(rank.ends_ns, 0);
  CHECK(rank.ends_ns < due_ns && rank.pacer.may_choose(rank.ends_ns));
}

// The last task has no rival, and after it comes the caller's work.
TEST_CASE(what_is_left_without_a_choice_is_launched_at_once) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  rank.now_ns = rank.ends_ns;
  rank.pacer.begin_step(forwards_only(4), Lookahead::kJit);
  for (int i = 0; i < 4; ++i) {
    CHECK((rank.run(100'000, 1'000'000) > rank.now_ns) == (i < 2));
  }
}

// Launches cost as much as tasks, or more: nothing is held back, as with kEager.
TEST_CASE(where_the_host_decides_jit_is_eager) {
  for (const std::int64_t launch_ns : {1'000'000, 1'500'000, 9'000'000}) {
    Rank jit(Lookahead::kJit), eager(Lookahead::kEager);
    for (int i = 0; i < 40; ++i) {
      CHECK(jit.run(launch_ns, 1'000'000) <= jit.now_ns);
      eager.run(launch_ns, 1'000'000);
      CHECK(jit.now_ns == eager.now_ns && jit.ends_ns == eager.ends_ns);
    }
  }
}

// By the shortest task and the longest launch but one, of the last sixteen.
TEST_CASE(what_varies_is_chosen_earlier) {
  Rank rank(Lookahead::kJit);
  rank.chooses_at_once = true;
  std::mt19937_64 random(rrfp::test::seed());
  std::vector<std::int64_t> tasks, launches;
  for (int i = 0; i < 60; ++i) {
    launches.push_back(80'000 + static_cast<std::int64_t>(random() % 40'000));
    tasks.push_back(900'000 + static_cast<std::int64_t>(random() % 300'000));
    const std::int64_t due_ns = rank.run(launches.back(), tasks.back());
    if (i < 20) continue;
    std::vector<std::int64_t> recent(launches.end() - 16, launches.end());
    std::sort(recent.begin(), recent.end());
    const auto shortest = std::min_element(tasks.end() - 17, tasks.end() - 1);
    CHECK(due_ns == rank.begins_ns + *shortest - recent[14] - kAhead);
  }
}

TEST_CASE(the_dearest_launch_of_the_step_counts) {
  Rank rank(Lookahead::kJit, both_kinds());
  for (int i = 0; i < 60; ++i) {
    rank.run(100'000, 1'000'000, kF);
    rank.run(250'000, 2'000'000, kB);
  }
  CHECK(rank.run(100'000, 1'000'000, kF) == rank.ends_ns - 250'000 - kAhead);
  CHECK(rank.run(250'000, 2'000'000, kB) == rank.ends_ns - 250'000 - kAhead);
  rank.now_ns = rank.ends_ns;
  rank.pacer.begin_step(forwards_only(), Lookahead::kJit);
  rank.run(100'000, 1'000'000, kF);
  CHECK(rank.run(100'000, 1'000'000, kF) == rank.ends_ns - 100'000 - kAhead);
}

// While one kind of the step is unknown, so is the next launch.
TEST_CASE(a_launch_that_is_not_known_may_be_dear) {
  Rank rank(Lookahead::kJit, both_kinds());
  learn(rank, kF);
  CHECK(rank.run(100'000, 1'000'000, kF) <= rank.now_ns);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
