// StepScript: what simulated ranks are to run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "runtime/step_plan.hpp"

namespace rrfp::test {

struct StepScript {
  std::shared_ptr<const StepPlan> plan;
  std::function<std::int64_t(const Task&)> duration_ns;
  std::uint32_t num_steps = 1;
  std::int64_t starts_ns = 0;  // nobody enters the first step before
  std::int64_t stall_timeout_ms = 100;
  // Broken on purpose, for the mutants.
  bool swaps_consumers = false;
  bool forgets_leftovers = false;
};

}  // namespace rrfp::test
