// LaunchPacer on a virtual clock: from which instant the next task may be chosen.
//
// Each case was seen to fail on its mutant of launch_pacer.cc:
//   - two unfinished tasks hold back nothing ............ two_unfinished_hold_everything_back
//   - kNone is kJit, kEager is kJit ..................... without_look_ahead..., eager_chooses...
//   - no kAheadNs, as long as all tasks are alike ....... just_in_time_to_the_nanosecond
//   - the longest task, the longest launch, the last one  what_varies_is_chosen_earlier
//   - the cheapest launch counts, or those of old steps . the_dearest_launch_of_the_step_counts
//   - what is not known counts as nothing ............... a_launch_that_is_not_known_may_be_dear
//   - a launch counts from the claim alone, or never .... a_launch_begins_when_the_worker_is_free
//   - the longest launch counts ......................... one_launch_of_sixteen_is_left_out
//   - the early end of a wide interval is a sample ..... an_end_seen_late_is_no_sample
//   - wide intervals teach nothing ...................... tasks_that_became_shorter_are_found
//   - a wait for a message is part of the task .......... a_message_waited_for_is_no_sample
//   - a step begins where the last one ended ............ a_step_begins_on_a_device_that_is_busy
#include "runtime/launch_pacer.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"

using namespace rrfp;

namespace {

constexpr TaskKind kF = TaskKind::kForward;
constexpr TaskKind kB = TaskKind::kBackward;
constexpr std::int64_t kAhead = LaunchPacer::kAheadNs;
constexpr std::int64_t kHeld = LaunchPacer::kNotBeforeAnEnd;

TaskTable forwards_only() { return TaskTable({0}, {kF}, 8); }
TaskTable both_kinds() { return TaskTable({0}, {kF, kB}, 8); }

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
void learn(Rank& rank, TaskKind kind = kF) {
  for (int i = 0; i < 60; ++i) rank.run(100'000, 1'000'000, kind);
}

}  // namespace

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

// What a worker that may choose does before it has the task belongs to the launch (it waits for
// the interpreter, say); what it waits for a task does not.
TEST_CASE(a_launch_begins_when_the_worker_is_free) {
  for (const bool waited : {false, true}) {
    Rank rank(Lookahead::kJit);
    for (int i = 0; i < 60; ++i) {
      rank.pacer.claimed(kF, 0, rank.now_ns + 50'000, waited);
      rank.now_ns += 150'000;
      rank.pacer.launched(rank.now_ns);
      const std::int64_t before_ns = rank.ends_ns;
      rank.begins_ns = std::max(rank.now_ns, before_ns);
      rank.ends_ns = rank.begins_ns + 1'000'000;
      if (before_ns > rank.now_ns) {
        rank.pacer.look(rank.now_ns, 2);
        rank.pacer.look(rank.now_ns = before_ns, 2);
      }
      rank.pacer.look(rank.now_ns, 1);
    }
    CHECK(rank.pacer.choose_from_ns() == rank.ends_ns - (waited ? 100'000 : 150'000) - kAhead);
  }
}

// One launch loads the kernels, or is held up by the garbage collector.
TEST_CASE(one_launch_of_sixteen_is_left_out) {
  Rank rank(Lookahead::kJit);
  rank.run(800'000, 1'000'000);
  rank.run(100'000, 1'000'000);
  CHECK(rank.run(100'000, 1'000'000) == rank.ends_ns - 100'000 - kAhead);
  rank.run(400'000, 1'000'000);
  CHECK(rank.run(100'000, 1'000'000) == rank.ends_ns - 400'000 - kAhead);
}

TEST_CASE(a_device_that_stood_still_once_says_nothing) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  rank.run(100'000, 1'000'000'000);
  rank.run(100'000, 1'000'000);
  CHECK(rank.run(100'000, 1'000'000) == rank.ends_ns - 100'000 - kAhead);
}

// One that a descheduled worker sees long after it happened.
TEST_CASE(an_end_seen_late_is_no_sample) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  for (int i = 0; i < 20; ++i) {
    rank.run(100'000, 1'000'000);
    rank.pacer.claimed(kF, 0, rank.now_ns, false);
    rank.pacer.launched(rank.now_ns + 100'000);
    rank.now_ns = rank.ends_ns + 700'000;  // it slept; the next has nearly ended, too
    rank.ends_ns += 1'000'000;
    rank.pacer.look(rank.now_ns, 1);
    rank.pacer.look(rank.ends_ns, 1);
    rank.pacer.look(rank.ends_ns, 0);
    rank.now_ns = rank.ends_ns;
  }
  rank.run(100'000, 1'000'000);
  CHECK(rank.run(100'000, 1'000'000) == rank.ends_ns - 100'000 - kAhead);
}

// From one step to the next: every launch is late by then, so no interval is narrow.
TEST_CASE(tasks_that_became_shorter_are_found) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  rank.now_ns = rank.ends_ns;
  rank.pacer.begin_step(forwards_only(), Lookahead::kJit);
  for (int i = 0; i < 40; ++i) rank.run(100'000, 300'000);
  const std::int64_t due_ns = rank.run(100'000, 300'000);
  CHECK(due_ns <= rank.ends_ns - 100'000);
  CHECK(due_ns >= rank.ends_ns - 200'000);
}

TEST_CASE(tasks_that_became_longer_are_found) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  for (int i = 0; i < 60; ++i) rank.run(100'000, 3'000'000);
  const std::int64_t due_ns = rank.run(100'000, 3'000'000);
  CHECK(due_ns <= rank.ends_ns - 100'000 - kAhead && due_ns >= rank.ends_ns - 125'000);
}

// Behind a wait of the stream: 1,000,000 for the task, and 5,000,000 for the message before it.
TEST_CASE(a_message_waited_for_is_no_sample) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  for (int i = 0; i < 20; ++i) {
    rank.choose();
    rank.pacer.claimed(kF, 0, rank.now_ns, false);
    rank.pacer.waits_for_message();
    rank.pacer.launched(rank.now_ns + 100'000);
    rank.pacer.look(rank.ends_ns, 2);
    rank.pacer.look(rank.ends_ns, 1);
    // Due as if the message were there: the device cannot end it earlier.
    CHECK(rank.pacer.choose_from_ns() == rank.ends_ns + 900'000 - kAhead);
    rank.now_ns = rank.ends_ns;
    rank.ends_ns += 6'000'000;
  }
  rank.run(100'000, 1'000'000);
  CHECK(rank.run(100'000, 1'000'000) == rank.ends_ns - 100'000 - kAhead);
}

// The optimizer's kernels may still run when a step's first task is launched.
TEST_CASE(a_step_begins_on_a_device_that_is_busy) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  for (int i = 0; i < 20; ++i) {
    rank.pacer.begin_step(forwards_only(), Lookahead::kJit);
    rank.pacer.claimed(kF, 0, rank.ends_ns, true);
    rank.pacer.launched(rank.ends_ns + 100'000);
    rank.ends_ns += 5'000'000 + 1'000'000;
    rank.pacer.look(rank.ends_ns, 1);
    rank.pacer.look(rank.ends_ns, 0);
    rank.now_ns = rank.ends_ns;
  }
  // A short task from the earliest begin.
  CHECK(rank.run(100'000, 1'000'000) == rank.begins_ns - 100'000 + 900'000 - kAhead);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
