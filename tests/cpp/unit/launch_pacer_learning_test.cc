// LaunchPacer on a virtual clock: what it learns of tasks and launches, and what not.
//
// Each case was seen to fail on its mutant of launch_pacer.cc:
//   - a launch counts from the claim alone, or never .... a_launch_begins_when_the_worker_is_free
//   - the longest launch counts ......................... one_launch_of_sixteen_is_left_out
//   - the early end of a wide interval is a sample ..... an_end_seen_late_is_no_sample
//   - wide intervals teach nothing ...................... tasks_that_became_shorter_are_found
//   - a wait for a message is part of the task .......... a_message_waited_for_is_no_sample
//   - a step begins where the last one ended ............ a_step_begins_on_a_device_that_is_busy
//   - a task begins when the one before has ended ...... an_idle_device_is_no_part_of_the_task
#include "unit/launch_pacer_rank.hpp"

using namespace rrfp;
using namespace rrfp::test;

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

// A rank that waits for its messages gives each task to an idle device.
TEST_CASE(an_idle_device_is_no_part_of_the_task) {
  Rank rank(Lookahead::kJit);
  learn(rank);
  for (int i = 0; i < 20; ++i) {
    rank.now_ns = rank.ends_ns;
    rank.pacer.look(rank.now_ns, 1);
    rank.pacer.look(rank.now_ns, 0);
    rank.now_ns += 7'000'000;
    rank.pacer.claimed(kF, 0, rank.now_ns, true);
    rank.now_ns += 100'000;
    rank.pacer.launched(rank.now_ns);
    rank.ends_ns = rank.now_ns + 1'000'000;
    rank.pacer.look(rank.now_ns, 1);
  }
  CHECK(rank.pacer.choose_from_ns() == rank.ends_ns - 100'000 - 100'000 - kAhead);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
