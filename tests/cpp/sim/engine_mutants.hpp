// What the engine would do with one bug: the checkers must find each of them.
#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <utility>

#include "runtime/step_engine.hpp"

namespace rrfp::test {

inline thread_local std::int64_t mutant_seed = 0;  // when the bug strikes, from the step's seed

// Loses one arrival.
struct DropsArrival : StepEngine {
  using StepEngine::StepEngine;
  Delivery deliver(const Task& target, std::int32_t source, void* payload, std::int64_t now_ns) {
    if (++num_deliveries == mutant_seed % 5 + 1) return Delivery::kWaiting;
    return StepEngine::deliver(target, source, payload, now_ns);
  }
  std::int64_t num_deliveries = 0;
};

// Takes a second arrival of one task for a new one: the task runs twice.
struct AppliesTwice : StepEngine {
  using StepEngine::StepEngine;
  Choice claim(std::int64_t now_ns) {
    if (again.local >= 0) return std::exchange(again, Choice{});
    const Choice choice = StepEngine::claim(now_ns);
    if (choice.local >= 0 && ++num_claims == mutant_seed % 7 + 1) again = choice;
    return choice;
  }
  void retire(std::int32_t local, std::int64_t now_ns) {
    if (again.local < 0 && record(local).retired_ns != 0) return;
    StepEngine::retire(local, now_ns);
  }
  Delivery deliver(const Task& target, std::int32_t source, void* payload, std::int64_t now_ns) {
    const Delivery delivery = StepEngine::deliver(target, source, payload, now_ns);
    return delivery == Delivery::kDuplicate ? Delivery::kWaiting : delivery;
  }
  Choice again;
  std::int64_t num_claims = 0;
};

// Looks away once while something is ready.
struct LooksAway : StepEngine {
  using StepEngine::StepEngine;
  Choice claim(std::int64_t now_ns) {
    if (++num_looks == mutant_seed % 6 + 2) return {};
    return StepEngine::claim(now_ns);
  }
  std::int64_t num_looks = 0;
};

// Hands one message to another microbatch's task.
struct WrongMicrobatch : StepEngine {
  using StepEngine::StepEngine;
  Delivery deliver(const Task& target, std::int32_t source, void* payload, std::int64_t now_ns) {
    Task other = target;
    other.microbatch = (target.microbatch + 1) % plan().num_microbatches();
    const bool strikes = ++num_deliveries == mutant_seed % 5 + 1;
    const Delivery delivery =
        StepEngine::deliver(strikes ? other : target, source, payload, now_ns);
    return delivery == Delivery::kDuplicate ? Delivery::kWaiting : delivery;
  }
  std::int64_t num_deliveries = 0;
};

// Admits whenever a unit is free for the chunk, also where one must stay with the earliest.
struct AdmitsWithoutReservation : StepEngine {
  AdmitsWithoutReservation(std::shared_ptr<const StepPlan> plan, std::int32_t rank,
                           TaskTimes* times, std::unique_ptr<StepAgreement> agreement,
                           std::pmr::memory_resource* memory)
      : StepEngine(plan, rank, times, options_of(*plan, rank),
                   std::move(agreement), memory) {}
  static ArbiterOptions options_of(const StepPlan& plan, std::int32_t rank) {
    ArbiterOptions options = plan.arbiter_options(rank);
    options.admission = AdmissionRule::kLevelled;
    options.limit_bytes = kUnlimited;
    return options;
  }
};

// Goes on waiting long after the announced task is overdue, whatever else arrives.
struct WaitsForTheOverdue : StepEngine {
  using StepEngine::StepEngine;
  Choice claim(std::int64_t now_ns) {
    if (now_ns < until_ns) return {-1, Blocked::kHint, 0, until_ns};
    Choice choice = StepEngine::claim(now_ns);
    if (choice.wait_until_ns != 0) until_ns = choice.wait_until_ns += 100000000;
    return choice;
  }
  std::int64_t until_ns = 0;
};

// Runs the first W in the place of its I, and that I when the engine asks for the W.
struct WeightBeforeInput : StepEngine {
  using StepEngine::StepEngine;
  Choice claim(std::int64_t now_ns) {
    if (state == State::kOwesInput) {
      state = State::kHidesWeight;
      return {input_grad};
    }
    Choice choice = StepEngine::claim(now_ns);
    if (choice.local < 0) return choice;
    const Task task = table().task(choice.local);
    if (state == State::kUntouched && task.kind == TaskKind::kInputGrad) {
      state = State::kRunsWeight;
      input_grad = choice.local;
      weight = table().local({task.stage, TaskKind::kWeightGrad, task.microbatch});
      return {weight};
    }
    if (choice.local == weight) {  // it has run
      StepEngine::retire(weight, now_ns);
      return claim(now_ns);
    }
    return choice;
  }
  void retire(std::int32_t local, std::int64_t now_ns) {
    if (state == State::kRunsWeight) {
      state = State::kOwesInput;
    } else {
      StepEngine::retire(local, now_ns);
    }
  }
  enum class State : std::uint8_t { kUntouched, kRunsWeight, kOwesInput, kHidesWeight };
  State state = State::kUntouched;
  std::int32_t input_grad = -1, weight = -1;
};

}  // namespace rrfp::test
