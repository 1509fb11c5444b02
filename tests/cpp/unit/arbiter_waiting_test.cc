// What the arbiter waits for, and until when: announced tasks that the hint puts first.
#include "check.hpp"
#include "unit/arbiter_rank.hpp"

namespace rrfp {
namespace {

using namespace test;

constexpr ArbiterOptions kPatient{.forward_patience = 0.5, .weight_patience = 1.0};

// 0F0 and 0F1 have run; 0F2 is ready. F and W take 100.
struct Waiting : Rank {
  explicit Waiting(HintRule rule, std::int32_t limit = kUnlimited)
      : Rank(1, {kF, kI, kW}, 4, rule, "0F0 0F1 0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2 0I3 0W3",
             with_limit(limit)) {
    times.add_duration(kF, 0, 100);
    times.add_duration(kW, 0, 100);
    arrive("0F0 0F1 0F2");
    next();
    next();
  }
  static ArbiterOptions with_limit(std::int32_t limit) {
    ArbiterOptions options = kPatient;
    options.limit_units = limit;
    return options;
  }
};

// 0I0 stands before 0F2 and is due in half of 0F2's 100: waited for. At its moment it is overdue.
TEST_CASE(a_forward_waits_for_the_gradient_before_it_and_no_longer_than_announced) {
  Waiting rank(HintRule::kOrder);
  rank.announce("0I0", 1000, 60);
  CHECK(rank.next(1010) == "wait until 1060");
  CHECK(rank.arbiter.select(1010).blocked == Blocked::kHint);
  CHECK(rank.next(1059) == "wait until 1060");
  CHECK(rank.next(1060) == "0F2");
  Waiting early(HintRule::kOrder);
  early.announce("0I0", 1000, 60);
  CHECK(early.next(1009) == "0F2");
}

// Gradients vary by 4 %, so 0I0 may be late by 16 % of its 60: 9 more.
TEST_CASE(a_wait_outlasts_the_announced_moment_by_what_such_tasks_vary) {
  Waiting rank(HintRule::kOrder);
  rank.times.add_duration(kI, 0, 100);
  rank.times.add_duration(kI, 0, 120);  // mean 104, deviation .2 x 20
  rank.announce("0I0", 1000, 60);
  CHECK(rank.next(1009) == "0F2");  // due in 51: the grace makes nobody wait for longer tasks
  Waiting later(HintRule::kOrder);
  later.times.add_duration(kI, 0, 100);
  later.times.add_duration(kI, 0, 120);
  later.announce("0I0", 1000, 60);
  CHECK(later.next(1011) == "wait until 1069");
  CHECK(later.next(1068) == "wait until 1069");
  CHECK(later.next(1069) == "0F2");
}

// The grace is at most what the awaited task usually takes.
TEST_CASE(a_wait_ends_however_much_tasks_vary) {
  Waiting rank(HintRule::kOrder);
  rank.times.add_duration(kI, 0, 100);
  rank.times.add_duration(kI, 0, 10000);
  rank.announce("0I0", 1000, 60);
  CHECK(rank.next(1011) == "wait until 1120");
}

// 0F2 usually takes 101, give or take 1: 0I0 must be due in .5 x (1 - 3 x .0099) x 101 = 49.
TEST_CASE(what_varies_waits_less) {
  Waiting rank(HintRule::kOrder);
  rank.times.add_duration(kF, 0, 105);
  rank.announce("0I0", 1000, 60);
  CHECK(rank.next(1010) == "0F2");
  Waiting later(HintRule::kOrder);
  later.times.add_duration(kF, 0, 105);
  later.announce("0I0", 1000, 60);
  CHECK(later.next(1011) == "wait until 1060");
  Waiting wild(HintRule::kOrder);
  wild.times.add_duration(kF, 0, 1000);  // mean 280, deviation 180
  wild.announce("0I0", 1000, 60);
  CHECK(wild.next(1059) == "0F2");
}

TEST_CASE(an_arrival_ends_the_wait) {
  Waiting rank(HintRule::kOrder);
  rank.announce("0I0", 1000, 60);
  CHECK(rank.next(1020) == "wait until 1060");
  rank.arrive("0I0");
  CHECK(rank.next(1030) == "0I0");
  CHECK(rank.next(1031) == "0F2");
}

TEST_CASE(usual_travel_is_part_of_the_moment) {
  Waiting rank(HintRule::kOrder);
  rank.times.add_travel(kI, 0, 25);
  rank.announce("0I0", 1000, 60);
  CHECK(rank.next(1040) == "wait until 1085");
}

TEST_CASE(only_what_the_hint_puts_first_is_waited_for) {
  Waiting rank(HintRule::kOrder);
  rank.announce("0I1", 1000, 40);  // stands behind 0F2
  rank.announce("0F3", 1000, 40);  // a forward, and 0F2 is no W
  CHECK(rank.next(1001) == "0F2");
  Waiting filler(HintRule::kOrderThenWeight, 3);
  filler.arrive("0I0");
  CHECK(filler.next(1000) == "0I0");
  filler.arrive("0W0");
  filler.announce("0F3", 1000, 40);
  CHECK(filler.next(1001) == "0F2");
  CHECK(filler.next(1002) == "0W0");  // 0F3 is announced, but there is no unit for it
  CHECK(filler.next(1003) == "input");
  filler.arrive("0I1");
  CHECK(filler.next(1004) == "0I1");
  filler.arrive("0W1");
  CHECK(filler.next(1005) == "wait until 1040");
}

TEST_CASE(a_round_waits_only_for_what_stands_before_its_forward) {
  Waiting rank(HintRule::kBackwardForward);
  rank.announce("0I1", 1000, 40);  // a backward and its half of the round, but behind 0F2
  CHECK(rank.next(1001) == "0F2");
  Waiting before(HintRule::kBackwardForward);
  before.announce("0I0", 1000, 40);
  CHECK(before.next(1001) == "wait until 1040");
}

TEST_CASE(gradients_start_at_once_and_the_unknown_is_not_waited_for) {
  Waiting rank(HintRule::kOrder);
  rank.announce("0I0", 1000, 40);
  rank.arrive("0I1");
  CHECK(rank.next(1001) == "wait until 1040");  // 0F2 is better placed, and waits
  Waiting gradient(HintRule::kOrderThenWeight);
  gradient.announce("0I0", 1000, 40);
  gradient.next(1040);  // 0F2
  gradient.arrive("0I2 0I1");
  CHECK(gradient.next(1041) == "0I1");
  Rank unknown(1, {kF, kB}, 4, HintRule::kBackwardForward, kFourByKind, kPatient);
  unknown.arrive("0F0 0F1");
  unknown.next();
  unknown.announce("0B0", 1000, 1);
  CHECK(unknown.next(1000) == "0F1");  // nobody knows how long an F takes
}

// BF: in the second half of a round the forward goes first, and waits for nothing.
TEST_CASE(rounds_wait_in_their_first_half_only) {
  Rank rank(1, {kF, kB}, 4, HintRule::kBackwardForward,
            "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3", kPatient);
  rank.times.add_duration(kF, 0, 100);
  rank.arrive("0F0 0F1 0F2 0F3");
  rank.next();
  rank.next();
  rank.announce("0B0", 1000, 40);
  CHECK(rank.next(1000) == "wait until 1040");
  rank.arrive("0B0");
  CHECK(rank.next(1040) == "0B0");
  rank.announce("0B1", 1040, 40);
  CHECK(rank.next(1041) == "0F2");
  CHECK(rank.next(1042) == "wait until 1080");
  CHECK(!rank.announce("0B1", 1042, 90));  // once
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
