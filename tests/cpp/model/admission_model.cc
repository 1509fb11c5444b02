// No reachable state of small pipelines deadlocks under the admission rules of the arbiter,
// whatever the hint, the limits and the order in which messages arrive; and the obvious rule
// (admit when a unit is free) does deadlock, so that this search is known to find deadlocks.
#include "arbiter/named_orders.hpp"
#include "check.hpp"
#include "model/admission_world.hpp"
#include "model/plain_arbiter.hpp"

namespace rrfp::test {
namespace {

constexpr HintRule kAllRules[] = {HintRule::kOrder, HintRule::kBackwardForward,
                                  HintRule::kForwardBackward, HintRule::kBackwardPriority,
                                  HintRule::kForwardPriority};

enum class Shape { kOneFOneB, kBreadthFirst, kDepthFirst };

// Breadth first: every microbatch through a chunk before the next chunk. Depth first: a
// microbatch through all chunks before the next microbatch. Backwards come last in both.
std::vector<Task> order_of(Shape shape, const AdmissionCase& of, std::int32_t rank) {
  std::vector<std::int32_t> given;
  for (std::int32_t m = 0; m < of.num_microbatches; ++m) given.push_back(m);
  if (shape == Shape::kOneFOneB) return one_f_one_b_order(rank, of.num_ranks, given);
  std::vector<Task> forwards, backwards;
  const std::int32_t num_pairs = of.num_chunks * of.num_microbatches;
  for (std::int32_t i = 0; i < num_pairs; ++i) {
    const bool breadth = shape == Shape::kBreadthFirst;
    const std::int32_t chunk = breadth ? i / of.num_microbatches : i % of.num_chunks;
    const std::int32_t m = breadth ? i % of.num_microbatches : i / of.num_chunks;
    const std::int32_t mirrored = of.num_chunks - 1 - chunk;
    forwards.push_back({chunk * of.num_ranks + rank, TaskKind::kForward, m});
    backwards.push_back({mirrored * of.num_ranks + rank, TaskKind::kBackward, m});
  }
  forwards.insert(forwards.end(), backwards.begin(), backwards.end());
  return forwards;
}

AdmissionCase pipeline(std::int32_t num_ranks, std::int32_t num_chunks,
                       std::int32_t num_microbatches, Shape shape) {
  AdmissionCase of;
  of.num_ranks = num_ranks;
  of.num_chunks = num_chunks;
  of.num_microbatches = num_microbatches;
  for (std::int32_t r = 0; r < num_ranks; ++r) of.orders.push_back(order_of(shape, of, r));
  return of;
}

// Calls `use` with the case under every combination of limits from least to most per rank.
template <class Use>
void for_all_limits(AdmissionCase of, std::int32_t least, std::int32_t most, Use use) {
  of.limits.assign(of.num_ranks, least);
  for (std::int32_t rank = 0; rank < of.num_ranks;) {
    if (rank == 0) use(of);
    if (++of.limits[rank] <= most) {
      rank = 0;
    } else {
      of.limits[rank++] = least;
    }
  }
}

std::int64_t states_seen = 0;

void expect_no_deadlock(const AdmissionCase& of) {
  const SearchResult result = AdmissionWorld<Arbiter>(of).search();
  states_seen += result.states;
  if (result.deadlock.empty()) return;
  std::string limits;
  for (const std::int32_t limit : of.limits) limits.append(" ").append(std::to_string(limit));
  fail(__FILE__, __LINE__,
       "deadlock with P " + std::to_string(of.num_ranks) + ", V " + std::to_string(of.num_chunks) +
           ", M " + std::to_string(of.num_microbatches) + ", rule " +
           std::to_string(static_cast<int>(of.rule)) + ", slack " + std::to_string(of.slack) +
           ", limits" + limits + " after " + result.deadlock);
}

template <class ArbiterUnderTest>
bool deadlocks(AdmissionCase of, std::int32_t limit) {
  of.limits.assign(of.num_ranks, limit);
  return !AdmissionWorld<ArbiterUnderTest>(of).search().deadlock.empty();
}

void print_states() {
  std::printf("  %lld states\n", static_cast<long long>(states_seen));
  states_seen = 0;
}

// The largest cases of each search run with one rule: as the adversary decides what is ready
// when a rank asks, the rule changes little, and smaller cases cover every rule.

TEST_CASE(chains_never_deadlock_with_unlimited_slack) {
  for (std::int32_t num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    for (std::int32_t m = 1; m <= 4; ++m) {
      for (const HintRule rule : kAllRules) {
        if (num_ranks * m >= 9 && rule != HintRule::kOrder) continue;
        AdmissionCase of = pipeline(num_ranks, 1, m, Shape::kOneFOneB);
        of.rule = rule;
        for_all_limits(of, 1, m, expect_no_deadlock);
      }
    }
  }
  print_states();
}

TEST_CASE(chains_never_deadlock_with_bounded_slack) {
  for (std::int32_t num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    for (std::int32_t m = 1; m <= 4; ++m) {
      for (const std::int32_t slack : {1, 2, 3}) {
        for (const HintRule rule : {HintRule::kOrder, HintRule::kBackwardForward}) {
          if (num_ranks * m >= 9 && rule != HintRule::kOrder) continue;
          AdmissionCase of = pipeline(num_ranks, 1, m, Shape::kOneFOneB);
          of.rule = rule;
          of.slack = slack;
          of.admission = AdmissionRule::kEarliest;
          for_all_limits(of, 1, m, expect_no_deadlock);
        }
      }
    }
  }
  print_states();
}

TEST_CASE(two_chunks_never_deadlock_with_unlimited_slack) {
  for (std::int32_t num_ranks = 1; num_ranks <= 2; ++num_ranks) {
    for (std::int32_t m = 1; m <= 3; ++m) {
      for (const Shape shape : {Shape::kBreadthFirst, Shape::kDepthFirst}) {
        for (const AdmissionRule admission : {AdmissionRule::kLevelled, AdmissionRule::kEarliest}) {
          for (const HintRule rule : kAllRules) {
            if (num_ranks * m == 6 && rule != HintRule::kOrder) continue;
            AdmissionCase of = pipeline(num_ranks, 2, m, shape);
            of.rule = rule;
            of.admission = admission;
            for_all_limits(of, 2, 2 * m, expect_no_deadlock);
          }
        }
      }
    }
  }
  print_states();
}

// The forwards of a microbatch that has begun here are exempt from slack: without that, a
// breadth-first order bars chunk 1 of microbatch 0 behind chunk 0 of a later one, which finds no
// unit.
TEST_CASE(two_chunks_never_deadlock_with_bounded_slack) {
  for (std::int32_t num_ranks = 1; num_ranks <= 2; ++num_ranks) {
    for (std::int32_t m = 1; m <= 3; ++m) {
      for (const Shape shape : {Shape::kBreadthFirst, Shape::kDepthFirst}) {
        for (const std::int32_t slack : {1, 2, 3}) {
          AdmissionCase of = pipeline(num_ranks, 2, m, shape);
          of.slack = slack;
          of.admission = AdmissionRule::kEarliest;
          for_all_limits(of, 2, 2 * m, expect_no_deadlock);
        }
      }
    }
  }
  print_states();
}

// Backwards in the step's order, as bitwise equal gradients need it.
TEST_CASE(backwards_in_order_never_deadlock_under_the_earliest_rule) {
  for (const std::int32_t num_chunks : {1, 2}) {
    for (std::int32_t num_ranks = 1; num_ranks * num_chunks <= 4 && num_ranks <= 3; ++num_ranks) {
      for (std::int32_t m = 1; m <= 3; ++m) {
        AdmissionCase of = pipeline(num_ranks, num_chunks, m, Shape::kBreadthFirst);
        of.weight_in_order = true;
        of.admission = AdmissionRule::kEarliest;
        for_all_limits(of, num_chunks, num_chunks * m, expect_no_deadlock);
        of.all_in_order = true;
        for_all_limits(of, num_chunks, num_chunks * m, expect_no_deadlock);
      }
    }
  }
  print_states();
  AdmissionCase levelled = pipeline(1, 1, 4, Shape::kOneFOneB);
  levelled.weight_in_order = true;
  for (const std::int32_t limit : {1, 2, 3}) CHECK(deadlocks<Arbiter>(levelled, limit));
}

// With one rank and two chunks: exactly the limits from V to (V - 1) M.
TEST_CASE(the_plain_rule_deadlocks_with_two_chunks) {
  for (std::int32_t m = 2; m <= 4; ++m) {
    const AdmissionCase of = pipeline(1, 2, m, Shape::kBreadthFirst);
    for (std::int32_t limit = 2; limit <= 2 * m; ++limit) {
      CHECK(deadlocks<PlainArbiter>(of, limit) == (limit <= m));
    }
  }
  CHECK(deadlocks<PlainArbiter>(pipeline(2, 2, 3, Shape::kBreadthFirst), 3));
}

// For one chunk the levelled rule is the plain one: neither may be used with bounded slack.
TEST_CASE(the_plain_and_the_levelled_rule_deadlock_with_bounded_slack) {
  for (const std::int32_t num_ranks : {2, 3}) {
    for (const std::int32_t m : {3, 4}) {
      for (const std::int32_t slack : {1, 3}) {
        AdmissionCase of = pipeline(num_ranks, 1, m, Shape::kOneFOneB);
        of.slack = slack;
        CHECK(deadlocks<PlainArbiter>(of, 1));
        CHECK(deadlocks<Arbiter>(of, 1));
        of.admission = AdmissionRule::kEarliest;
        CHECK(!deadlocks<Arbiter>(of, 1));
      }
    }
  }
}

// What bounded slack needs besides, and StepPlan sees to: the order runs forwards in the step's
// microbatch order. Otherwise the slack can bar the very forward that the limit is kept for.
TEST_CASE(bounded_slack_needs_the_steps_order) {
  AdmissionCase of = pipeline(2, 1, 2, Shape::kOneFOneB);
  for (std::vector<Task>& order : of.orders) {
    for (Task& task : order) task.microbatch = 1 - task.microbatch;
  }
  of.admission = AdmissionRule::kEarliest;
  CHECK(!deadlocks<Arbiter>(of, 1));
  of.slack = 1;
  CHECK(deadlocks<Arbiter>(of, 1));
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
