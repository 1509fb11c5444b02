// Limits in bytes never lead to a deadlock, whatever the sizes, the limits and the order in which
// messages arrive, and hold wherever a limit has room for every microbatch (the arbiter's own
// invariant says so at every claim). Searched in full on the real arbiter and plans, for random
// sizes; ranks that count units stand beside those that count bytes. The obvious rule, "admit what
// fits", does deadlock.
#include <algorithm>
#include <cstdio>
#include <random>

#include "check.hpp"
#include "model/graph_shapes.hpp"
#include "model/graph_world.hpp"
#include "model/plain_arbiter.hpp"

namespace rrfp::test {
namespace {

struct ByteCase {
  StepOptions options;
  std::string text;
};

// Limits from a byte up to what holds everything: also such as no microbatch fits in.
ByteCase draw(const Shape& shape, std::int32_t num_microbatches, bool split,
              std::mt19937_64& random) {
  const auto pick = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  ByteCase of;
  StepOptions& options = of.options;
  options.num_microbatches = num_microbatches;
  options.split_backward = split;
  const char* const hints[] = {"gpipe", "bf", "fb", "f-priority", "auto"};
  options.hint = hints[pick(0, 4)];
  options.weight_in_order = pick(0, 2) == 0;
  const std::int32_t slacks[] = {kUnlimited, kUnlimited, 1, 3};
  options.slack = slacks[pick(0, 3)];
  for (std::int32_t m = 0; m < num_microbatches; ++m) options.microbatch_order.push_back(m);
  std::shuffle(options.microbatch_order.begin(), options.microbatch_order.end(), random);
  const std::int64_t largest = pick(1, 9);
  std::vector<std::int64_t> total(shape.num_ranks(), 0);
  for (const std::int32_t rank : shape.rank_of_stage) {
    auto& sizes = options.activation_bytes.emplace_back();
    for (std::int32_t m = 0; m < num_microbatches; ++m) {
      sizes.push_back(pick(0, largest));
      total[rank] += sizes.back();
    }
  }
  of.text = std::string(shape.name) + (split ? ", split, " : ", ") + options.hint + ", slack " +
            std::to_string(options.slack) + ", limits in bytes";
  for (std::int32_t rank = 0; rank < shape.num_ranks(); ++rank) {
    const bool counts_units = pick(0, 5) == 0;
    options.limits_bytes.push_back(counts_units ? kUnlimited : pick(0, total[rank]));
    of.text += " " + std::to_string(options.limits_bytes.back());
  }
  return of;
}

// The tasks that lead to a deadlock; empty: there is none.
template <class ArbiterUnderTest>
std::string deadlock_of(const Shape& shape, const StepOptions& options) {
  const auto graph = std::make_shared<StageGraph>(shape.num_ranks(), shape.rank_of_stage,
                                                  shape.edges, std::vector<std::int32_t>{});
  const StepPlan plan(graph, options);
  std::vector<std::int32_t> units;
  for (std::int32_t rank = 0; rank < shape.num_ranks(); ++rank) {
    units.push_back(plan.limit_units(rank));
  }
  GraphWorld<ArbiterUnderTest> world(plan, units, plan.arbiter_options(0).admission);
  return world.search().second;
}

void search(const Shape* const* shapes, std::size_t num_shapes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < num_shapes; ++i) {
    const Shape& shape = *shapes[i];
    const auto num_stages = static_cast<std::int32_t>(shape.rank_of_stage.size());
    for (const bool split : {false, true}) {
      for (std::int32_t m = 1; m <= shape.most_microbatches; ++m) {
        if (m * num_stages > 9) continue;  // ends in seconds
        for (int draws = 0; draws < 80; ++draws) {
          const ByteCase of = draw(shape, m, split, random);
          const std::string deadlock = deadlock_of<Arbiter>(shape, of.options);
          if (!deadlock.empty()) {
            fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": deadlock of " + of.text +
                                         " after " + deadlock);
          }
        }
      }
    }
  }
}

TEST_CASE(no_deadlock_in_bytes_on_chains) { search(kChains, std::size(kChains), 1); }

TEST_CASE(no_deadlock_in_bytes_on_graphs) { search(kGraphs, std::size(kGraphs), 2); }

// Two chunks on one rank and room for two forwards: both go to the first chunk.
TEST_CASE(admitting_what_fits_deadlocks) {
  StepOptions options;
  options.num_microbatches = 2;
  options.hint = "gpipe";
  options.activation_bytes = {{3, 3}, {3, 3}};
  options.limits_bytes = {6};
  CHECK(!deadlock_of<PlainArbiter>(kChunks, options).empty());
  CHECK(deadlock_of<Arbiter>(kChunks, options).empty());
}

// Weight gradients in order, and the first microbatch is late: the others fill its room.
TEST_CASE(the_late_one_keeps_its_room) {
  StepOptions options;
  options.num_microbatches = 3;
  options.hint = "gpipe";
  options.weight_in_order = true;
  options.activation_bytes = {{5, 2, 2}};
  options.limits_bytes = {6};
  CHECK(!deadlock_of<PlainArbiter>(kOneStage, options).empty());
  CHECK(deadlock_of<Arbiter>(kOneStage, options).empty());
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
