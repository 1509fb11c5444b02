// The variability models: what they add, and how much of it, counted over many tasks.
#include "sim/variability.hpp"

#include <cmath>

#include "check.hpp"

using namespace rrfp;
using namespace rrfp::sim;
using rrfp::test::seed;

namespace {

constexpr std::int32_t kStages = 6;
constexpr std::int32_t kMicrobatches = 2000;

double units(const StepDraw& draw, const Task& task) {
  return static_cast<double>(draw.duration_ns(task)) / static_cast<double>(kUnitNs);
}

bool is_near(double got, double wanted, double within) { return std::abs(got - wanted) < within; }

}  // namespace

TEST_CASE(jitter_strikes_as_often_and_as_hard_as_its_level_says) {
  const double probability[] = {0.1, 0.2, 0.3}, alpha[] = {0.5, 1.0, 1.5};
  const std::vector<Variability> levels = jitters(20);
  CHECK(levels.size() == 3);
  for (std::size_t level = 0; level < levels.size(); ++level) {
    const StepDraw draw(levels[level], kStages, kMicrobatches, seed());
    for (const TaskKind kind : {TaskKind::kForward, TaskKind::kBackward, TaskKind::kInputGrad,
                                TaskKind::kWeightGrad}) {
      const double usual = kind == TaskKind::kBackward ? 2 : 1;
      int num_struck = 0;
      double extra = 0;
      for (std::int32_t m = 0; m < kMicrobatches; ++m) {
        const double longer = units(draw, {1, kind, m}) - usual;
        CHECK(longer == 0 || (longer >= 0.499 * alpha[level] * usual &&
                              longer <= 1.501 * alpha[level] * usual));
        num_struck += longer > 0;
        extra += longer;
      }
      const bool is_struck = kind != TaskKind::kWeightGrad;
      CHECK(is_near(double(num_struck) / kMicrobatches, is_struck * probability[level], 0.04));
      CHECK(!is_struck || is_near(extra / num_struck, alpha[level] * usual, 0.1 * usual));
    }
  }
}

TEST_CASE(the_base_bounds_the_jitter_of_short_tasks_from_below) {
  // A unit of 1 ms and a base of 10 ms: a struck task takes at least 5 ms more.
  const StepDraw draw(jitters(1)[1], kStages, kMicrobatches, seed());
  for (std::int32_t m = 0; m < kMicrobatches; ++m) {
    const double longer = units(draw, {2, TaskKind::kForward, m}) - 1;
    CHECK(longer == 0 || (longer >= 4.999 && longer <= 15.001));
  }
}

TEST_CASE(uneven_and_slow_stages_multiply) {
  const Variability uneven{
      .name = "", .last_extra = 0.5, .first_extra = 0.25, .slow_stages = 2, .slow_factor = 3};
  const StepDraw draw(uneven, kStages, 2, seed());
  int num_slow = 0;
  for (std::int32_t stage = 0; stage < kStages; ++stage) {
    const double share = stage == 0 ? 1.25 : stage == kStages - 1 ? 1.5 : 1.0;
    const double forward = units(draw, {stage, TaskKind::kForward, 1});
    const bool is_slow = is_near(forward, 3 * share, 1e-6);
    CHECK(is_slow || is_near(forward, share, 1e-6));
    CHECK(is_near(units(draw, {stage, TaskKind::kBackward, 0}), 2 * forward, 1e-5));
    num_slow += is_slow;
  }
  CHECK(num_slow == 2);
}

TEST_CASE(without_variability_nothing_varies) {
  const StepDraw draw({}, kStages, 3, seed());
  CHECK(draw.duration_ns({3, TaskKind::kForward, 1}) == kUnitNs);
  CHECK(draw.duration_ns({3, TaskKind::kBackward, 1}) == 2 * kUnitNs);
  CHECK(draw.latency_ns({3, TaskKind::kForward, 1}) == kUnitNs / 20);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
