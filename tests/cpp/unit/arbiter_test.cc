// Arbiter, case by case: each rule, slack, limit and reason on a state small enough to check by
// hand. arbiter_waiting_test.cc has the waits; arbiter_oracle_test.cc compares the arbiter with a
// brute-force twin on random states.
#include "check.hpp"
#include "unit/arbiter_rank.hpp"

namespace rrfp {
namespace {

using namespace test;

Rank four(HintRule rule, ArbiterOptions options = {}) {
  return Rank(1, {kF, kB}, 4, rule, kFourByKind, options);
}

// State in which two F and two B are ready, and the order in which the rule takes them.
std::string two_of_each(HintRule rule) {
  Rank rank = four(rule);
  rank.arrive("0F0 0F1");
  rank.next();
  rank.next();
  CHECK(rank.next() == "input");  // and any round that was open is over
  rank.arrive("0F3 0F2 0B1 0B0");
  return rank.run();
}

TEST_CASE(each_rule_chooses_between_kinds_as_defined) {
  CHECK(two_of_each(HintRule::kOrder) == "0F2 0F3 0B0 0B1 input");
  CHECK(two_of_each(HintRule::kBackwardForward) == "0B0 0F2 0B1 0F3 input");
  CHECK(two_of_each(HintRule::kForwardBackward) == "0F2 0B0 0F3 0B1 input");
  CHECK(two_of_each(HintRule::kBackwardPriority) == "0B0 0B1 0F2 0F3 input");
  CHECK(two_of_each(HintRule::kForwardPriority) == "0F2 0F3 0B0 0B1 input");
}

// BF alternates: after a backward a forward goes first, even with a backward waiting; after
// that forward the round is over. Catches "always backward first".
TEST_CASE(a_bf_round_is_one_backward_then_one_forward) {
  Rank rank = four(HintRule::kBackwardForward);
  rank.arrive("0F0 0F1 0F2");
  CHECK(rank.next() == "0F0");
  CHECK(rank.next() == "0F1");
  rank.arrive("0B0 0B1");
  CHECK(rank.next() == "0B0");
  CHECK(rank.next() == "0F2");
  CHECK(rank.next() == "0B1");
}

// After 0B0 nothing is ready: the round ends there, so the next one starts with a backward.
TEST_CASE(a_select_that_finds_nothing_ends_the_round) {
  Rank rank = four(HintRule::kBackwardForward);
  rank.arrive("0F0 0F1");
  rank.next();
  rank.next();
  rank.arrive("0B0");
  CHECK(rank.next() == "0B0");
  CHECK(rank.next() == "input");
  rank.arrive("0F2 0B1");
  CHECK(rank.next() == "0B1");
  CHECK(rank.next() == "0F2");
}

// After 0B0 one unit is free, and it is kept for microbatch 3: the round ends, 0B1 is next.
TEST_CASE(a_forward_that_is_not_admissible_ends_the_bf_round) {
  Rank rank(1, {kF, kB}, 5, HintRule::kBackwardForward,
            "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4",
            {.limit_units = 3, .admission = AdmissionRule::kEarliest});
  rank.arrive("0F0 0F1 0F2 0F4");
  CHECK(rank.run() == "0F0 0F1 0F2 limit");
  rank.arrive("0B0 0B1");
  CHECK(rank.run() == "0B0 0B1 0F4 input");
  CHECK(rank.arbiter.peak_units() == 3);
}

TEST_CASE(slack_zero_runs_the_order_and_nothing_else) {
  Rank rank(1, {kF, kB}, 2, HintRule::kForwardPriority, "0F0 0F1 0B0 0B1",
            {.slack = 0, .limit_units = 2});
  rank.arrive("0F1");
  CHECK(rank.next() == "slack");
  rank.arrive("0F0");
  CHECK(rank.next() == "0F0");
  CHECK(rank.next() == "0F1");
  CHECK(rank.next() == "input");
  rank.arrive("0B1");
  CHECK(rank.next() == "slack");  // a backward is not exempt from the fixed order
  rank.arrive("0B0");
  CHECK(rank.run() == "0B0 0B1 done");
  CHECK(rank.arbiter.num_claimed() == 4);
  CHECK(rank.arbiter.first_unclaimed_position() == 4);
}

TEST_CASE(slack_counts_positions_from_the_first_unclaimed) {
  Rank rank = four(HintRule::kOrder, {.slack = 2, .admission = AdmissionRule::kEarliest});
  rank.arrive("0F3");
  CHECK(rank.next() == "slack");  // position 3, first unclaimed 0
  rank.arrive("0F2");
  CHECK(rank.next() == "0F2");
  CHECK(rank.overtaken == 2);
  CHECK(rank.next() == "slack");
  rank.arrive("0B2");  // position 6, exempt
  CHECK(rank.next() == "0B2");
  CHECK(rank.overtaken == 5);
  rank.arrive("0F0");
  CHECK(rank.next() == "0F0");
  CHECK(rank.overtaken == 0);
  CHECK(rank.arbiter.first_unclaimed_position() == 1);
  CHECK(rank.next() == "0F3");
  CHECK(rank.overtaken == 1);
}

TEST_CASE(the_limit_is_named_until_a_backward_gives_back) {
  Rank rank = four(HintRule::kForwardPriority, {.limit_units = 2});
  rank.arrive("0F0 0F1 0F2");
  CHECK(rank.run() == "0F0 0F1 limit");
  CHECK(rank.arbiter.units_held() == 2);
  rank.arrive("0B0");
  CHECK(rank.run() == "0B0 0F2 input");
  CHECK(rank.arbiter.units_held() == 2);
  CHECK(rank.arbiter.peak_units() == 2);
}

TEST_CASE(split_units_are_given_back_at_w) {
  Rank rank(1, {kF, kI, kW}, 2, HintRule::kBackwardForward, "0F0 0I0 0W0 0F1 0I1 0W1",
            {.limit_units = 1});
  rank.arrive("0F0 0F1");
  CHECK(rank.run() == "0F0 limit");
  rank.arrive("0I0");
  CHECK(rank.run() == "0I0 limit");
  rank.arrive("0W0");
  CHECK(rank.run() == "0W0 0F1 input");
}

// W is a filler for the rules (BFW), and a task like the others for a plain order.
TEST_CASE(w_waits_for_i_and_f_except_in_a_plain_order) {
  for (const HintRule rule : {HintRule::kBackwardForward, HintRule::kOrder}) {
    Rank rank(1, {kF, kI, kW}, 3, rule, "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2", {});
    rank.arrive("0F0 0I0");
    rank.next();
    rank.next();
    rank.arrive("0F1 0W0 0F2");
    CHECK(rank.run() ==
          (rule == HintRule::kOrder ? "0W0 0F1 0F2 input" : "0F1 0F2 0W0 input"));
  }
}

TEST_CASE(forward_prefers_the_lower_chunk_and_backward_the_higher) {
  Rank rank(2, {kF, kB}, 2, HintRule::kBackwardPriority,
            "1F0 1F1 0F0 0F1 0B0 0B1 1B0 1B1", {});
  rank.arrive("1F0 0F1 0F0 1F1");
  CHECK(rank.run() == "0F0 0F1 1F0 1F1 input");
  rank.arrive("0B0 1B1 0B1 1B0");
  CHECK(rank.run() == "1B0 1B1 0B0 0B1 done");
}

// Levelled: chunk c of V needs V - c free units, so chunk 1 may run where chunk 0 may not.
TEST_CASE(levelled_admission_keeps_units_for_later_chunks) {
  Rank rank(2, {kF, kB}, 2, HintRule::kForwardPriority, "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",
            {.limit_units = 2});
  rank.arrive("0F0 0F1");
  CHECK(rank.run() == "0F0 limit");
  rank.arrive("1F0");
  CHECK(rank.run() == "1F0 limit");
}

// Earliest: a head that is not admissible must not hide the F of the earliest microbatch.
TEST_CASE(the_earliest_microbatch_passes_an_inadmissible_head) {
  Rank rank(1, {kF, kB}, 4, HintRule::kOrder, "0F1 0F2 0F0 0F3 0B1 0B2 0B0 0B3",
            {.limit_units = 2, .admission = AdmissionRule::kEarliest});
  rank.arrive("0F1 0F2");
  CHECK(rank.run() == "0F1 limit");
  rank.arrive("0F0");
  CHECK(rank.next() == "0F0");
  CHECK(rank.overtaken == 1);
}

TEST_CASE(earliest_follows_the_steps_order_not_the_number) {
  Rank rank(1, {kF, kB}, 3, HintRule::kOrder, "0F0 0F1 0F2 0B0 0B1 0B2",
            {.limit_units = 2, .admission = AdmissionRule::kEarliest}, {2, 1, 0});
  rank.arrive("0F0 0F1");
  CHECK(rank.run() == "0F0 limit");  // the last unit is kept for microbatch 2
  rank.arrive("0F2");
  CHECK(rank.next() == "0F2");
}

TEST_CASE(forward_only_steps_hold_nothing) {
  Rank rank(1, {kF}, 3, HintRule::kBackwardForward, "0F0 0F1 0F2",
            {.limit_units = 1, .units_returned = false});
  rank.arrive("0F0 0F1 0F2");
  CHECK(rank.run() == "0F0 0F1 0F2 done");
  CHECK(rank.arbiter.peak_units() == 0);
}

TEST_CASE(a_second_arrival_is_reported) {
  Rank rank = four(HintRule::kOrder);
  CHECK(rank.arrive("0F0"));
  CHECK(!rank.arrive("0F0"));
  CHECK(rank.next() == "0F0");
  CHECK(!rank.arrive("0F0"));
  CHECK(rank.next() == "input");
}

TEST_CASE(select_alone_claims_nothing) {
  Rank rank = four(HintRule::kBackwardForward);
  rank.arrive("0F1");
  const Choice first = rank.arbiter.select();
  const Choice second = rank.arbiter.select();
  CHECK(first.local == second.local && first.local >= 0);
  CHECK(rank.arbiter.num_claimed() == 0);
}

// Positions decide between chunks where the hint is an order; W fills in.
TEST_CASE(order_then_weight_and_rounds_by_position_follow_positions_across_chunks) {
  const std::string order = "1F0 0F0 0F1 1F1 0I0 0W0 1I0 1W0 0I1 0W1 1I1 1W1";
  Rank rank(2, {kF, kI, kW}, 2, HintRule::kOrderThenWeight, order, {});
  rank.arrive("0F0 0F1 1F0 1F1");
  CHECK(rank.run() == "1F0 0F0 0F1 1F1 input");
  rank.arrive("1I0 0I0");
  CHECK(rank.next() == "0I0");
  rank.arrive("0W0 1I1");
  CHECK(rank.run() == "1I0 1I1 0W0 input");
  Rank rounds(2, {kF, kB}, 2, HintRule::kRoundsByPosition,
              "1F0 0F0 0F1 1F1 0B0 1B0 0B1 1B1", {});
  rounds.arrive("0F0 1F0");
  CHECK(rounds.run() == "1F0 0F0 input");
  rounds.arrive("0F1 1F1 0B0 1B0");
  CHECK(rounds.run() == "0B0 0F1 1B0 1F1 input");
}

TEST_CASE(weights_run_in_the_steps_order) {
  Rank rank(1, {kF, kI, kW}, 3, HintRule::kOrder, "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2",
            {.admission = AdmissionRule::kEarliest, .weight_in_order = true}, {1, 0, 2});
  rank.arrive("0F0 0F1 0F2 0I0 0I2 0W0 0W2");
  CHECK(rank.run() == "0F0 0F1 0F2 0I0 0I2 slack");  // microbatch 1 comes first
  rank.arrive("0I1 0W1");
  CHECK(rank.run() == "0I1 0W1 0W0 0W2 done");
  Rank full(1, {kF, kB}, 2, HintRule::kBackwardPriority, "0F0 0F1 0B0 0B1",
            {.admission = AdmissionRule::kEarliest, .weight_in_order = true});
  full.arrive("0F0 0F1 0B1");
  CHECK(full.run() == "0F0 0F1 slack");
}

TEST_CASE(forwards_and_input_gradients_of_named_chunks_run_in_the_steps_order) {
  Rank rank(1, {kF, kI, kW}, 3, HintRule::kOrder, "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2",
            {.admission = AdmissionRule::kEarliest,
             .weight_in_order = true,
             .forward_in_order = {true},
             .input_in_order = {true}},
            {1, 0, 2});
  rank.arrive("0F0 0F2");
  CHECK(rank.run() == "slack");
  rank.arrive("0F1");
  CHECK(rank.run() == "0F1 0F0 0F2 input");
  rank.arrive("0I0 0I2");
  CHECK(rank.run() == "slack");
  rank.arrive("0I1 0W1");
  CHECK(rank.run() == "0I1 0I0 0I2 0W1 input");
}

// Two chunks, slack 1: 1F0 stands 3 behind 0F1, which the limit keeps out until 1F0 has run.
TEST_CASE(bounded_slack_lets_the_earliest_microbatch_go_on) {
  Rank rank(2, {kF, kB}, 4, HintRule::kOrder,
            "0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 0B0 0B1 0B2 0B3",
            {.slack = 1, .limit_units = 2, .admission = AdmissionRule::kEarliest});
  rank.arrive("0F0 0F1");
  CHECK(rank.run() == "0F0 limit");
  rank.arrive("1F0");
  CHECK(rank.next() == "1F0");
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
