// Thousands of seeded steps of the simulated world, each judged by checkers that share no code
// with the engine; and broken engines, each of which the checkers must find.
//
//   pipeline_sim [seeds]     or RRFP_SEEDS; 1,000 by default. RRFP_SEED is the first one.
#include <cstdlib>

#include "check.hpp"
#include "random_step.hpp"
#include "step_checkers.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

std::int64_t num_seeds = 1000;
constexpr std::int64_t kMutantSeeds = 300;

sim::WorldOptions world_of(const RandomStep& step) {
  sim::WorldOptions world;
  world.duration_ns = [&](const Task& task) { return step.duration_ns(task); };
  world.latency_ns = [&](const Task& from, std::int32_t) { return step.latency_ns(from); };
  world.fifo_links = step.fifo_links();
  return world;
}

// ---- Mutants: what the engine would do with one bug. ----

thread_local std::int64_t mutant_seed = 0;  // when the bug strikes, from the step's seed

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

// Runs the step with the engine, the plan and a share of the latencies; the checkers see the
// step as it was meant.
template <class Engine>
std::string judge(const RandomStep& step, std::shared_ptr<const StepPlan> used_plan,
                  double share_of_latency = 1.0) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::int64_t> latest_ns;
  VirtualModel model;
  model.duration_ns = [&](const Task& task) { return step.duration_ns(task); };
  model.arrival_ns = [&](const Task& from, std::int32_t target, std::int64_t now_ns) {
    const double latency_ns = share_of_latency * static_cast<double>(step.latency_ns(from));
    std::int64_t at_ns = now_ns + static_cast<std::int64_t>(latency_ns);
    std::int64_t& link_ns = latest_ns[{from.stage, target}];
    if (step.fifo_links()) at_ns = std::max(at_ns, link_ns);
    return link_ns = std::max(link_ns, at_ns), at_ns;
  };
  VirtualOutcome outcome = run_virtually<Engine>(used_plan, model);
  const auto meant_plan = step.plan();
  const Schedule schedule{outcome.finished, std::move(outcome.ranks),
                          std::move(outcome.peak_units)};
  return StepChecker(step, *meant_plan, schedule).verdict();
}

template <class Judge>
void find_mutant(const char* name, Judge judge_seed) {
  for (std::int64_t i = 0; i < kMutantSeeds; ++i) {
    mutant_seed = static_cast<std::int64_t>(seed()) + i;
    const std::string wrong = judge_seed(RandomStep(mutant_seed));
    if (wrong.empty()) continue;
    std::printf("  mutant %-20s found after %lld seeds: %s\n", name,
                static_cast<long long>(i + 1), wrong.c_str());
    return;
  }
  fail(__FILE__, __LINE__, std::string("the checkers did not find the mutant ") + name);
}

}  // namespace

TEST_CASE(random_steps_keep_every_promise) {
  std::int64_t messages = 0, reordered = 0, limit_hits = 0, slack_hits = 0, overtakes = 0;
  for (std::int64_t i = 0; i < num_seeds; ++i) {
    const RandomStep step(seed() + i);
    const auto plan = step.plan();
    sim::WorldResult world = sim::simulate(plan, world_of(step));
    const Schedule schedule{world.finished, std::move(world.ranks), std::move(world.peak_units)};
    const std::string wrong = StepChecker(step, *plan, schedule).verdict();
    if (!wrong.empty()) {
      fail(__FILE__, __LINE__, "seed " + std::to_string(seed() + i) + ": " + wrong + " (" +
                                   step.text() + ")");
    }
    messages += world.messages;
    reordered += world.reordered;
    limit_hits += world.limit_hits;
    slack_hits += world.slack_hits;
    overtakes += world.overtakes;
  }
  std::printf("  %lld seeds: %lld messages, %lld reordered, %lld limit hits, %lld slack hits, "
              "%lld overtakes\n",
              static_cast<long long>(num_seeds), static_cast<long long>(messages),
              static_cast<long long>(reordered), static_cast<long long>(limit_hits),
              static_cast<long long>(slack_hits), static_cast<long long>(overtakes));
  CHECK(messages > 0 && reordered > 0 && limit_hits > 0 && slack_hits > 0 && overtakes > 0);
}

TEST_CASE(a_step_is_a_function_of_its_seed) {
  for (std::uint64_t i = 0; i < 20; ++i) {
    const RandomStep step(seed() + i);
    const auto first = sim::simulate(step.plan(), world_of(step));
    const auto second = sim::simulate(step.plan(), world_of(step));
    CHECK(first.makespan_ns == second.makespan_ns);
    for (std::size_t rank = 0; rank < first.ranks.size(); ++rank) {
      for (std::size_t at = 0; at < first.ranks[rank].size(); ++at) {
        CHECK(first.ranks[rank][at].task == second.ranks[rank][at].task);
        CHECK(first.ranks[rank][at].start_ns == second.ranks[rank][at].start_ns);
      }
    }
  }
}

TEST_CASE(fifo_links_do_not_reorder) {
  std::int64_t reordered = 0;
  for (std::uint64_t i = 0; i < 100; ++i) {
    const RandomStep step(seed() + i);
    sim::WorldOptions world = world_of(step);
    world.fifo_links = true;
    reordered += sim::simulate(step.plan(), world).reordered;
  }
  CHECK(reordered == 0);
}

TEST_CASE(checkers_find_every_mutant) {
  find_mutant("drops an arrival", [](const RandomStep& step) {
    return judge<DropsArrival>(step, step.plan());
  });
  find_mutant("applies one twice", [](const RandomStep& step) {
    return judge<AppliesTwice>(step, step.plan());
  });
  find_mutant("looks away", [](const RandomStep& step) {
    return judge<LooksAway>(step, step.plan());
  });
  find_mutant("slack plus one", [](const RandomStep& step) {
    StepOptions options = step.options();
    if (options.slack == kUnlimited) return std::string();
    ++options.slack;
    return judge<StepEngine>(step, step.plan_with(options));
  });
  find_mutant("ignores the limit", [](const RandomStep& step) {
    StepOptions options = step.options();
    if (options.slack == 0 || options.limits.empty()) return std::string();
    options.limits.assign(step.num_ranks(), step.num_microbatches());
    return judge<StepEngine>(step, step.plan_with(options));
  });
  find_mutant("half the latency", [](const RandomStep& step) {
    return judge<StepEngine>(step, step.plan(), 0.5);
  });
}

int main(int argc, char** argv) {
  if (const char* text = std::getenv("RRFP_SEEDS")) num_seeds = std::atoll(text);
  if (argc > 1 && std::atoll(argv[1]) > 0) {
    num_seeds = std::atoll(argv[1]);
    argc = 1;
  }
  return rrfp::test::run(argc, argv);
}
