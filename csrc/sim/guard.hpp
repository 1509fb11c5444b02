// The guard: where the limit is tight, is the rule behind hint "auto" still better than keeping
// to its order? Learns scenarios from the last steps, simulates the candidates on them, and
// leaves the rule only for something that is clearly faster. Off the critical path: it reads
// tables and answers; nothing waits for it.
//
// Learnt   per kind and stage, what a task takes: a quadratic in the microbatch's known cost (a
//          mean where there are no costs); pooled over all of them, the noise around it, as a
//          factor; pooled, how long messages travel. A scenario draws noise and travels anew.
// Cost     kNumScenarios simulated steps for each of three candidates: about 3 us a task.
// Threads  any; a function of its arguments.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/step_plan.hpp"

namespace rrfp::sim {

inline constexpr std::size_t kGuardSteps = 8;  // the guard begins with the step after so many
inline constexpr int kNumScenarios = 4;

// What one step of the past took, on all ranks.
struct StepRecord {
  std::int32_t num_microbatches = 0;
  // By kind (as TaskKind counts), stage and microbatch; -1: no such task.
  std::vector<std::int64_t> durations_ns;
  // From the retire of the task to the arrival of what it computed; -1: no such message.
  std::vector<std::int64_t> travels_ns;
  std::vector<double> costs;  // by microbatch; empty: not known
};

enum class GuardChoice : std::uint8_t {
  kRule,      // go on with hint "auto"
  kFixed,     // its order, slack 0
  kSlackTwo,  // its order, slack 2
};

// Whether the guard has a say in the step: hint and slack are "auto" and the limit is tight.
bool is_guarded(const StepPlan& plan);

// For a step like `plan`, which must be guarded. kRule with fewer than kGuardSteps records.
// `costs` are those of the coming step, empty if not known.
GuardChoice guard(std::shared_ptr<const StepPlan> plan, const std::vector<StepRecord>& last_steps,
                  const std::vector<double>& costs, std::uint64_t seed);

// The plan of the choice.
std::shared_ptr<const StepPlan> guarded_plan(std::shared_ptr<const StepPlan> plan,
                                             GuardChoice choice);

}  // namespace rrfp::sim
