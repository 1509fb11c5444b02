// StageGraph and StepPlan: what is accepted, what it becomes, and what is refused in which words.
#include "runtime/step_plan.hpp"

#include <cstdio>
#include <string>
#include <vector>

#include "check.hpp"

using namespace rrfp;

namespace {

std::shared_ptr<const StageGraph> chain(std::int32_t num_stages) {
  std::vector<std::int32_t> ranks;
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  for (std::int32_t stage = 0; stage < num_stages; ++stage) {
    ranks.push_back(stage);
    if (stage > 0) edges.emplace_back(stage - 1, stage);
  }
  return std::make_shared<StageGraph>(num_stages, ranks, edges, std::vector<std::int32_t>{});
}

std::shared_ptr<const StageGraph> placed(std::int32_t num_ranks, std::vector<std::int32_t> ranks) {
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  for (std::size_t s = 1; s < ranks.size(); ++s) edges.emplace_back(s - 1, s);
  return std::make_shared<StageGraph>(num_ranks, ranks, edges, std::vector<std::int32_t>{});
}

std::vector<Task> tasks(const std::string& texts) {
  std::vector<Task> parsed;
  std::size_t at = 0;
  while (at < texts.size()) {
    const std::size_t end = std::min(texts.find(' ', at), texts.size());
    parsed.push_back(*parse_task(texts.substr(at, end - at)));
    at = end + 1;
  }
  return parsed;
}

std::string order_text(const StepPlan& plan, std::int32_t rank) {
  std::string text;
  for (std::int32_t at = 0; at < plan.hint_order(rank).num_tasks(); ++at) {
    if (at > 0) text += ' ';
    text += to_text(plan.table(rank).task(plan.hint_order(rank).local_at(at)));
  }
  return text;
}

StepOptions named(const std::string& hint, std::int32_t num_microbatches,
                  std::int32_t slack = kUnlimited, std::vector<std::int32_t> limits = {}) {
  StepOptions options;
  options.hint = hint;
  options.num_microbatches = num_microbatches;
  options.slack = slack;
  options.limits = std::move(limits);
  return options;
}

StepOptions split(const std::string& hint, std::int32_t num_microbatches,
                  std::int32_t slack = kUnlimited) {
  StepOptions options = named(hint, num_microbatches, slack);
  options.split_backward = true;
  return options;
}

StepOptions own_order(const std::string& texts, std::int32_t num_microbatches,
                      std::int32_t slack) {
  StepOptions options = named("order", num_microbatches, slack);
  options.order = tasks(texts);
  return options;
}

using Edges = std::vector<std::pair<std::int32_t, std::int32_t>>;

}  // namespace

TEST_CASE(graph_knows_its_neighbours) {
  const StageGraph diamond(2, {0, 0, 1, 1}, Edges{{2, 3}, {0, 2}, {1, 3}, {0, 1}}, {3});
  CHECK((diamond.consumers_of(0) == std::vector<std::int32_t>{1, 2}));
  CHECK((diamond.sources_of(3) == std::vector<std::int32_t>{1, 2}));
  CHECK((diamond.stages_of(1) == std::vector<std::int32_t>{2, 3}));
  CHECK(!diamond.is_chain() && diamond.is_loss(3) && !diamond.is_loss(2));
  CHECK((diamond.targets_of({3, TaskKind::kBackward, 0}) == std::vector<std::int32_t>{1, 2}));
  CHECK(diamond.targets_of({3, TaskKind::kForward, 0}).empty());
  CHECK(diamond.targets_of({3, TaskKind::kWeightGrad, 0}).empty());
  CHECK(chain(4)->is_chain() && chain(1)->is_chain() && chain(4)->is_loss(3));
}

TEST_CASE(graph_refuses_what_it_cannot_run) {
  const std::vector<std::int32_t> none;
  CHECK_THROWS_WITH(StageGraph(0, {0}, Edges{}, none), "at least 1 rank");
  CHECK_THROWS_WITH(StageGraph(1, {}, Edges{}, none), "at least 1 stage");
  CHECK_THROWS_WITH(StageGraph(2, {0, 2}, Edges{{0, 1}}, none), "stage 1 is placed on rank 2");
  CHECK_THROWS_WITH(StageGraph(3, {0, 2}, Edges{{0, 1}}, none), "rank 1 owns no stage");
  CHECK_THROWS_WITH(StageGraph(2, {0, 1}, Edges{{0, 2}}, none), "(0, 2)");
  CHECK_THROWS_WITH(StageGraph(2, {0, 1}, Edges{{1, 1}}, none), "to itself");
  CHECK_THROWS_WITH(StageGraph(2, {0, 1}, Edges{{0, 1}, {0, 1}}, none), "listed twice");
  CHECK_THROWS_WITH(StageGraph(2, {0, 1}, Edges{{0, 1}}, {2}), "loss stage 2 does not exist");
  CHECK_THROWS_WITH(StageGraph(2, {0, 1}, Edges{{0, 1}}, {0}), "output of stage 1");
  CHECK_THROWS_WITH(StageGraph(4, {0, 1, 2, 3}, Edges{{0, 1}, {1, 2}, {2, 1}, {2, 3}}, none),
                    "in a circle: 1 -> 2 -> 1");
}

TEST_CASE(named_orders_and_their_limits) {
  const StepPlan gpipe(chain(2), named("gpipe", 3));
  CHECK(order_text(gpipe, 1) == "1F0 1F1 1F2 1B0 1B1 1B2");
  CHECK(gpipe.limit_units(0) == 2);  // one unit per rank
  CHECK(StepPlan(chain(2), named("gpipe", 3, 0)).limit_units(0) == 3);  // the order's own peak
  const StepPlan one_f_one_b(chain(3), named("1f1b", 4, 0));
  CHECK(order_text(one_f_one_b, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  CHECK(order_text(one_f_one_b, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
  CHECK(one_f_one_b.limit_units(0) == 3 && one_f_one_b.limit_units(2) == 1);
  CHECK(one_f_one_b.arbiter_options(0).admission == AdmissionRule::kEarliest);
  CHECK(StepPlan(chain(3), named("bf", 4)).arbiter_options(0).admission ==
        AdmissionRule::kLevelled);
  CHECK(StepPlan(chain(3), named("bf", 4, 1)).arbiter_options(0).admission ==
        AdmissionRule::kEarliest);
  CHECK(StepPlan(chain(3), named("1f1b", 4, 2, {1, 7, 1})).limit_units(1) == 7);
}

// F 1, B 2, no latency, worked out by hand. A wrong duration, limit or round shows here.
TEST_CASE(positions_of_rules_are_their_unit_time_execution) {
  const StepPlan bf(chain(2), named("bf", 3));
  CHECK(bf.hint_order(0).rule() == HintRule::kBackwardForward);
  CHECK(order_text(bf, 0) == "0F0 0F1 0B0 0F2 0B1 0B2");
  CHECK(order_text(bf, 1) == "1F0 1B0 1F1 1B1 1F2 1B2");
  CHECK(order_text(StepPlan(chain(2), named("f-priority", 3, kUnlimited, {3, 3})), 0) ==
        "0F0 0F1 0F2 0B0 0B1 0B2");
  CHECK(order_text(StepPlan(chain(2), named("f-priority", 3, kUnlimited, {1, 1})), 0) ==
        "0F0 0B0 0F1 0B1 0F2 0B2");
  CHECK(order_text(StepPlan(chain(1), named("fb", 2)), 0) == "0F0 0B0 0F1 0B1");
  const StepPlan automatic(chain(2), named("auto", 3));
  CHECK(automatic.hint_order(1).rule() == HintRule::kBackwardForward);
  CHECK(order_text(automatic, 0) == order_text(bf, 0));
}

TEST_CASE(microbatch_order_moves_positions) {
  StepOptions options = named("bf", 3);
  options.microbatch_order = {2, 0, 1};
  CHECK(order_text(StepPlan(chain(2), options), 0) == "0F2 0F0 0B2 0F1 0B0 0B1");
  options.microbatch_order = {2, 0, 2};
  CHECK_THROWS_WITH(StepPlan(chain(2), options), "microbatch 2 twice, at places 0 and 2");
  options.microbatch_order = {2, 0, 3};
  CHECK_THROWS_WITH(StepPlan(chain(2), options), "microbatch 3 at place 2");
  options.microbatch_order = {0, 1};
  CHECK_THROWS_WITH(StepPlan(chain(2), options), "2 entries for 3 microbatches");
}

TEST_CASE(forward_only_steps_have_neither_backward_nor_units) {
  for (const char* hint : {"1f1b", "bf", "gpipe", "auto", "f-priority"}) {
    StepOptions options = named(hint, 3);
    options.forward_only = true;
    const StepPlan plan(chain(2), options);
    CHECK(order_text(plan, 0) == "0F0 0F1 0F2");
    CHECK(plan.limit_units(0) == kUnlimited && !plan.arbiter_options(0).units_returned);
  }
  StepOptions own = own_order("0F1 0F0 0B1 0B0", 2, 0);
  own.forward_only = true;
  CHECK(order_text(StepPlan(chain(1), own), 0) == "0F1 0F0");
}

TEST_CASE(refuses_limits_and_slack_with_the_numbers) {
  CHECK_THROWS_WITH(StepPlan(chain(2), named("bf", 2, kUnlimited, {2})), "1 numbers for 2 ranks");
  CHECK_THROWS_WITH(StepPlan(chain(2), named("bf", 2, kUnlimited, {1, -1})), "rank 1 is -1");
  CHECK_THROWS_WITH(StepPlan(chain(3), named("1f1b", 4, 0, {2, 2, 1})),
                    "rank 0 is 2, but hint \"1f1b\" with slack 0 needs 3");
  CHECK_THROWS_WITH(StepPlan(chain(2), named("bf", 2, -3)), "got -3");
  CHECK_THROWS_WITH(StepPlan(chain(2), named("bf", 0)), "at least 1 microbatch, got 0");
}

TEST_CASE(refuses_hints_by_name) {
  CHECK_THROWS_WITH(StepPlan(chain(2), named("zb-h2", 2)),
                    "\"zb-h2\" is not known; the hints are gpipe, 1f1b, interleaved, zb-h1, zbv, "
                    "bf, bfw, fb, b-priority, f-priority, auto");
  for (const char* hint : {"zb-h1", "bfw"}) {
    CHECK_THROWS_WITH(StepPlan(chain(2), named(hint, 2)), "needs weight gradients as tasks");
  }
  CHECK_THROWS_WITH(StepPlan(placed(2, {0, 1, 0, 1}), named("1f1b", 2)), "one stage per rank");
  CHECK_THROWS_WITH(StepPlan(placed(2, {0, 1, 0, 1}), split("zb-h1", 2)), "use zbv");
  CHECK_THROWS_WITH(StepPlan(placed(2, {0, 1, 0, 1}), split("zbv", 2)), "in a V");
  CHECK_THROWS_WITH(StepPlan(placed(2, {0, 1, 1, 0}), named("interleaved", 2)), "placement loop");
  StepOptions both = named("bf", 1);
  both.order = tasks("0F0 0B0");
  CHECK_THROWS_WITH(StepPlan(chain(1), both), "give one of them");
}

TEST_CASE(split_steps_have_input_and_weight_gradients) {
  const StepPlan zb(chain(2), split("zb-h1", 3, 0));
  CHECK(order_text(zb, 0) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2");
  CHECK(zb.limit_units(0) == 2 && zb.limit_units(1) == 2 && zb.split_backward());
  CHECK(order_text(StepPlan(chain(2), split("1f1b", 2, 0)), 1) == "1F0 1I0 1W0 1F1 1I1 1W1");
  // Unit times: rank 0 may not run 0F2 before 0W0, and 0I1 comes first, so that 1W1 fills a gap.
  const StepPlan bfw(chain(2), split("bfw", 3));
  CHECK(bfw.hint_order(0).rule() == HintRule::kBackwardForward);
  CHECK(order_text(bfw, 1) == "1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2");
  StepOptions own = own_order("0F0 0I0 0W0", 1, 0);
  own.split_backward = true;
  CHECK(order_text(StepPlan(chain(1), own), 0) == "0F0 0I0 0W0");
  own.order = tasks("0F0 0B0");
  CHECK_THROWS_WITH(StepPlan(chain(1), own), "the kinds F, I and W");
}

// What "auto" makes of graph, kinds and limit: rule, slack and what it waits for.
std::string auto_text(std::shared_ptr<const StageGraph> graph, bool split_backward,
                      std::vector<std::int32_t> limits, bool waiting = true) {
  StepOptions options = named("auto", 32, kAutoSlack, std::move(limits));
  options.split_backward = split_backward;
  options.waiting = waiting;
  const StepPlan plan(graph, options);
  const ArbiterOptions arbiter = plan.arbiter_options(0);
  const char* rules[] = {"order", "order then W", "bf", "bf by position"};
  char text[96];
  std::snprintf(text, sizeof text, "%s, slack %d, limit %d, F %.1f, W %.1f",
                rules[static_cast<int>(plan.hint_order(0).rule())], arbiter.slack,
                plan.limit_units(0), arbiter.forward_patience, arbiter.weight_patience);
  return text;
}

TEST_CASE(auto_follows_the_room_that_the_limit_leaves) {
  const auto four = [](std::int32_t units) { return std::vector<std::int32_t>(4, units); };
  CHECK(auto_text(chain(4), false, {}) == "bf, slack -1, limit 4, F 0.4, W 0.0");
  CHECK(auto_text(chain(4), true, {}) == "order, slack -1, limit 4, F 0.6, W 0.9");
  CHECK(auto_text(chain(4), true, four(5)) == "order then W, slack -1, limit 5, F 0.6, W 0.7");
  CHECK(auto_text(chain(4), true, four(5), false) ==
        "order then W, slack -1, limit 5, F 0.0, W 0.0");
  const auto loop = placed(2, {0, 1, 0, 1});
  const auto vee = placed(2, {0, 1, 1, 0});
  CHECK(auto_text(loop, false, {}) == "order, slack 4, limit 5, F 0.4, W 0.0");
  CHECK(auto_text(loop, false, {8, 8}) == "bf by position, slack -1, limit 8, F 0.4, W 0.0");
  CHECK(auto_text(vee, true, {}) == "order then W, slack 4, limit 4, F 0.6, W 0.9");
  CHECK(auto_text(vee, true, {8, 8}) == "order then W, slack -1, limit 8, F 0.4, W 0.5");
  CHECK(auto_text(vee, false, {8, 8}) == "bf by position, slack -1, limit 8, F 0.4, W 0.0");
  // Neither loop nor V: rounds, the lower chunk first.
  CHECK(auto_text(placed(2, {0, 0, 1, 1}), false, {}) == "bf, slack -1, limit 5, F 0.0, W 0.0");
  const StepPlan zb(chain(3), split("auto", 5));
  CHECK(order_text(zb, 1) == order_text(StepPlan(chain(3), split("zb-h1", 5)), 1));
}

TEST_CASE(weights_in_order_use_the_rule_that_suits_them) {
  StepOptions options = split("bfw", 4);
  options.weight_in_order = true;
  const StepPlan plan(chain(2), options);
  CHECK(plan.arbiter_options(0).weight_in_order);
  CHECK(plan.arbiter_options(0).admission == AdmissionRule::kEarliest);
  StepOptions own = own_order("0F0 0F1 0B1 0B0", 2, 0);
  CHECK(StepPlan(chain(1), own).limit_units(0) == 2);
  own.weight_in_order = true;
  CHECK_THROWS_WITH(StepPlan(chain(1), own), "0B1 where the weight gradients of stage 0 are at "
                                             "microbatch 0");
}

TEST_CASE(users_order_is_kept_or_refused) {
  const std::string fine = "0F1 1F1 0F0 1B1 1F0 0B1 1B0 0B0";
  const StepPlan plan(chain(2), own_order(fine, 2, 0));
  CHECK(order_text(plan, 0) == "0F1 0F0 0B1 0B0");
  CHECK(order_text(plan, 1) == "1F1 1B1 1F0 1B0");
  CHECK((plan.microbatch_order() == std::vector<std::int32_t>{1, 0}));
  CHECK(plan.limit_units(0) == 2 && plan.limit_units(1) == 1);
  CHECK_THROWS_WITH(StepPlan(chain(2), own_order("0F0 1F0 0B0 1B0 1F0", 1, 0)),
                    "1F0 twice, at positions 1 and 4");
  CHECK_THROWS_WITH(StepPlan(chain(2), own_order("0F0 1F0 0B0", 1, kUnlimited)), "1B0 of rank 1");
  CHECK_THROWS_WITH(StepPlan(chain(2), own_order("0F0 1F0 0B0 1B0 2F0", 1, 0)),
                    "2F0 at position 4, which is no task of this step");
  CHECK_THROWS_WITH(StepPlan(chain(1), own_order("0F0 0W0", 1, 0)), "the kinds F and B");
  StepOptions reordered = own_order(fine, 2, 0);
  reordered.microbatch_order = {1, 0};
  CHECK_THROWS_WITH(StepPlan(chain(2), reordered), "another microbatch order");
}

// Rank 0 wants 0B0 before 0F1, rank 1 wants 1F1 before 1B0: each waits for the other.
TEST_CASE(a_circle_between_ranks_is_named) {
  const std::string circle = "0F0 0B0 0F1 0B1 1F0 1F1 1B0 1B1";
  CHECK_THROWS_WITH(StepPlan(chain(2), own_order(circle, 2, 0)),
                    "0B0 waits for 1B0, which rank 1 runs only after 1F1; "
                    "1F1 waits for 0F1, which rank 0 runs only after 0B0");
  CHECK_THROWS_WITH(StepPlan(chain(1), own_order("0B0 0F0", 1, 0)),
                    "0B0 waits for 0F0, which rank 0 runs only after 0B0");
  StepPlan(chain(2), own_order(circle, 2, kUnlimited));  // only a ranking: fine
  // Rank 2 hangs on the circle without being part of it.
  CHECK_THROWS_WITH(
      StepPlan(chain(3), own_order("2F0 2B0 2F1 2B1 0F0 0B0 0F1 0B1 1F0 1F1 1B0 1B1", 2, 0)),
      "in a circle: 0B0 waits for 1B0");
}

TEST_CASE(bounded_slack_wants_microbatches_begun_alike) {
  StepPlan(chain(2), own_order("0F1 1F1 0F0 1B1 1F0 0B1 1B0 0B0", 2, 1));
  CHECK_THROWS_WITH(StepPlan(chain(2), own_order("0F0 0F1 1F1 1B1 1F0 1B0 0B1 0B0", 2, 3)),
                    "1F1 before 1F0 on rank 1, but stage 0 has microbatch 0 before microbatch 1");
  const std::vector<std::int32_t> sinks;
  const auto chunks = std::make_shared<StageGraph>(
      1, std::vector<std::int32_t>{0, 0}, Edges{{0, 1}}, sinks);
  StepPlan(chunks, own_order("0F0 0F1 1F1 1F0 1B0 1B1 0B0 0B1", 2, 1));
  const auto sources = std::make_shared<StageGraph>(
      1, std::vector<std::int32_t>{0, 0, 0}, Edges{{0, 2}, {1, 2}}, sinks);
  const char* turned = "0F0 0F1 1F1 1F0 2F0 2F1 2B0 2B1 0B0 0B1 1B0 1B1";
  CHECK_THROWS_WITH(StepPlan(sources, own_order(turned, 2, 1)), "0F1 before 1F0 on rank 0");
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
