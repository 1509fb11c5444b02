// No reachable state of small stage graphs deadlocks under the admission rules, on the real
// arbiter and plans: chains, chunks in a loop and in a V, several sources, skips and diamonds;
// B, or I and W; weight gradients free and in order; unlimited and bounded slack; all limits.
// The rules that are too weak for a case do deadlock there, so that the search is known to find
// deadlocks.
#include <cstdio>
#include <optional>

#include "check.hpp"
#include "model/graph_shapes.hpp"
#include "model/graph_world.hpp"
#include "model/plain_arbiter.hpp"

namespace rrfp::test {
namespace {

struct GraphCase {
  const Shape& shape;
  std::int32_t num_microbatches;
  const char* hint = "bf";
  bool split = false;
  bool weight_in_order = false;
  bool all_in_order = false;
  std::int32_t slack = kUnlimited;
  std::vector<std::int32_t> microbatch_order = {};
  std::optional<AdmissionRule> admission = {};  // in the place of the plan's own choice
};

// All forwards, then all backwards; stages other than the first have the microbatches the other
// way round.
std::vector<Task> contrary_order(const GraphCase& of) {
  std::vector<Task> order;
  for (const TaskKind kind : {TaskKind::kForward, TaskKind::kBackward}) {
    for (std::size_t s = 0; s < of.shape.rank_of_stage.size(); ++s) {
      for (std::int32_t m = 0; m < of.num_microbatches; ++m) {
        const std::int32_t turned = of.num_microbatches - 1 - m;
        order.push_back({static_cast<std::int32_t>(s), kind, s == 0 ? m : turned});
      }
    }
  }
  return order;
}

StepPlan plan_of(const GraphCase& of) {
  StepOptions options;
  options.num_microbatches = of.num_microbatches;
  options.microbatch_order = of.microbatch_order;
  options.hint = of.hint;
  if (options.hint == "order") options.order = contrary_order(of);
  options.split_backward = of.split;
  options.weight_in_order = of.weight_in_order;
  options.slack = of.slack;
  for (std::size_t s = 0; of.all_in_order && s < of.shape.rank_of_stage.size(); ++s) {
    options.forward_in_order.push_back(static_cast<std::int32_t>(s));
    options.input_in_order.push_back(static_cast<std::int32_t>(s));
  }
  const auto graph = std::make_shared<StageGraph>(of.shape.num_ranks(), of.shape.rank_of_stage,
                                                  of.shape.edges, std::vector<std::int32_t>{});
  return StepPlan(graph, options);
}

std::string text_of(const GraphCase& of, const std::vector<std::int32_t>& limits) {
  std::string text = std::string(of.shape.name) + ", M " + std::to_string(of.num_microbatches) +
                     ", " + of.hint + (of.split ? ", split" : "") +
                     (of.weight_in_order ? ", W in order" : "") +
                     (of.all_in_order ? ", all in order" : "") + ", slack " +
                     std::to_string(of.slack) + ", limits";
  for (const std::int32_t limit : limits) text += " " + std::to_string(limit);
  return text;
}

std::int64_t sets_seen = 0;
std::int64_t searches = 0;

template <class ArbiterUnderTest>
std::string deadlock_of(const StepPlan& plan, const GraphCase& of,
                        const std::vector<std::int32_t>& limits) {
  const AdmissionRule own = plan.arbiter_options(0).admission;
  GraphWorld<ArbiterUnderTest> world(plan, limits, of.admission.value_or(own));
  const auto [sets, deadlock] = world.search();
  sets_seen += sets;
  ++searches;
  return deadlock;
}

// Every combination of limits per rank, from its stages up to what holds every microbatch.
void expect_no_deadlock(const GraphCase& of) {
  const StepPlan plan = plan_of(of);
  const std::int32_t num_ranks = plan.graph().num_ranks();
  std::vector<std::int32_t> least, most;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    const auto stages = static_cast<std::int32_t>(plan.graph().stages_of(rank).size());
    least.push_back(of.slack == 0 ? plan.hint_order(rank).peak_units() : stages);
    most.push_back(std::max(least.back(), stages * of.num_microbatches));
  }
  std::vector<std::int32_t> limits = least;
  for (std::int32_t rank = 0; rank < num_ranks;) {
    if (rank == 0) {
      const std::string deadlock = deadlock_of<Arbiter>(plan, of, limits);
      if (!deadlock.empty()) {
        fail(__FILE__, __LINE__, "deadlock with " + text_of(of, limits) + " after " + deadlock);
      }
    }
    if (++limits[rank] <= most[rank]) {
      rank = 0;
    } else {
      limits[rank] = least[rank];
      ++rank;
    }
  }
}

template <class ArbiterUnderTest>
bool deadlocks(const GraphCase& of, std::int32_t limit) {
  const StepPlan plan = plan_of(of);
  const std::vector<std::int32_t> limits(plan.graph().num_ranks(), limit);
  return !deadlock_of<ArbiterUnderTest>(plan, of, limits).empty();
}

void print_sets() {
  std::printf("  %lld searches, %lld sets\n", static_cast<long long>(searches),
              static_cast<long long>(sets_seen));
  searches = sets_seen = 0;
}

std::vector<const Shape*> all_shapes() {
  std::vector<const Shape*> shapes(std::begin(kChains), std::end(kChains));
  shapes.insert(shapes.end(), std::begin(kGraphs), std::end(kGraphs));
  return shapes;
}

// The cases of a shape small enough to search under every limit.
template <class Use>
void for_all_sizes(const Shape& shape, bool split, Use use) {
  const auto num_stages = static_cast<std::int32_t>(shape.rank_of_stage.size());
  for (std::int32_t m = 1; m <= shape.most_microbatches; ++m) {
    if (!split || m * num_stages <= 9) use(m);
  }
}

TEST_CASE(no_deadlock_with_unlimited_slack) {
  for (const Shape* shape : all_shapes()) {
    for (const bool split : {false, true}) {
      for_all_sizes(*shape, split, [&](std::int32_t m) {
        expect_no_deadlock({*shape, m, split ? "bfw" : "bf", split});
      });
    }
  }
  print_sets();
}

TEST_CASE(no_deadlock_with_weight_gradients_in_order) {
  for (const Shape* shape : all_shapes()) {
    for (const bool split : {false, true}) {
      for_all_sizes(*shape, split, [&](std::int32_t m) {
        GraphCase of{*shape, m, split ? "bfw" : "bf", split, true};
        expect_no_deadlock(of);
        of.all_in_order = true;
        expect_no_deadlock(of);
      });
    }
  }
  print_sets();
}

// The earliest microbatch may stand last in a rank's own order.
TEST_CASE(no_deadlock_under_a_contrary_order) {
  for (const Shape* shape : all_shapes()) {
    for (const bool weight_in_order : {false, true}) {
      for_all_sizes(*shape, false, [&](std::int32_t m) {
        expect_no_deadlock({*shape, m, "order", false, weight_in_order});
      });
    }
  }
  print_sets();
}

// Every rule that "auto" may take, with its own positions, in an order that is not the given one.
TEST_CASE(no_deadlock_whatever_the_hint) {
  for (const Shape* shape : all_shapes()) {
    for (const char* hint : {"gpipe", "fb", "f-priority", "b-priority", "auto"}) {
      expect_no_deadlock({*shape, 2, hint, false, false, false, kUnlimited, {1, 0}});
    }
  }
  print_sets();
}

TEST_CASE(no_deadlock_with_bounded_slack) {
  for (const Shape* shape : all_shapes()) {
    const bool is_flat = shape == &kChainOfTwo || shape == &kChainOfThree;
    for (const char* hint : {is_flat ? "1f1b" : "gpipe", "bf"}) {
      for (const std::int32_t slack : {0, 1, 2, 3, 5}) {
        for_all_sizes(*shape, false, [&](std::int32_t m) {
          GraphCase of{*shape, m, hint, false, false, false, slack};
          expect_no_deadlock(of);
          of.weight_in_order = true;
          if (slack != 0) expect_no_deadlock(of);
        });
      }
    }
  }
  print_sets();
}

// The forwards of a microbatch that has begun on a rank are exempt from slack, also where it has
// to come by more than once more.
TEST_CASE(no_deadlock_with_bounded_slack_and_three_chunks) {
  for (const Shape* shape : {&kThreeChunks, &kLoopOfThree}) {
    for (const char* hint : {"gpipe", "interleaved", "f-priority"}) {
      for (const std::int32_t slack : {1, 2, 4}) {
        for_all_sizes(*shape, false, [&](std::int32_t m) {
          expect_no_deadlock({*shape, m, hint, false, false, false, slack});
        });
        for_all_sizes(*shape, true, [&](std::int32_t m) {
          expect_no_deadlock({*shape, m, hint, true, false, false, slack});
        });
      }
    }
  }
  print_sets();
}

// Where the obvious rule fails: with V chunks and unlimited slack at the limits V to (V - 1) M.
TEST_CASE(the_plain_rule_deadlocks_with_chunks) {
  for (const Shape* shape : {&kChunks, &kThreeChunks}) {
    const auto num_chunks = static_cast<std::int32_t>(shape->rank_of_stage.size());
    for (std::int32_t m = 2; m <= shape->most_microbatches; ++m) {
      for (std::int32_t limit = num_chunks; limit <= num_chunks * m; ++limit) {
        CHECK(deadlocks<PlainArbiter>({*shape, m, "gpipe"}, limit) ==
              (limit <= (num_chunks - 1) * m));
      }
    }
  }
  CHECK(deadlocks<PlainArbiter>({kLoop, 3, "gpipe"}, 3));
  print_sets();
}

TEST_CASE(the_weaker_rules_deadlock_with_weight_gradients_in_order) {
  for (const std::int32_t limit : {1, 2, 3}) {
    GraphCase of{kOneStage, 4, "gpipe", false, true};
    CHECK(deadlocks<PlainArbiter>(of, limit));
    CHECK(!deadlocks<Arbiter>(of, limit));
    of.admission = AdmissionRule::kLevelled;
    CHECK(deadlocks<Arbiter>(of, limit));
  }
  print_sets();
}

TEST_CASE(the_levelled_rule_deadlocks_with_two_sources) {
  for (std::int32_t limit = 2; limit <= 6; ++limit) {
    GraphCase of{kSourcesTogether, 3, "gpipe"};
    CHECK(!deadlocks<Arbiter>(of, limit));
    of.admission = AdmissionRule::kLevelled;
    CHECK(deadlocks<Arbiter>(of, limit) == (limit <= 4));
  }
  const Shape apart{"two sources, a rank each", {0, 1, 2}, {{0, 2}, {1, 2}}, 3};
  GraphCase of{apart, 3, "gpipe"};
  CHECK(!deadlocks<Arbiter>(of, 1));
  of.admission = AdmissionRule::kLevelled;
  CHECK(deadlocks<Arbiter>(of, 1));
  print_sets();
}

TEST_CASE(the_plain_rule_deadlocks_with_bounded_slack) {
  for (const Shape* shape : {&kChainOfTwo, &kChainOfThree}) {
    for (const std::int32_t m : {3, 4}) {
      for (const std::int32_t slack : {1, 3}) {
        const GraphCase of{*shape, m, "1f1b", false, false, false, slack};
        CHECK(deadlocks<PlainArbiter>(of, 1));
        CHECK(!deadlocks<Arbiter>(of, 1));
      }
    }
  }
  print_sets();
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
