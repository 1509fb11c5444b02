// Thousands of seeded steps of the simulated world, each judged by checkers that share no code
// with the engine; and broken engines, each of which the checkers must find.
//
//   pipeline_sim [seeds [ranks microbatches]]     20,000 seeds by default; see seeds.hpp.
#include <optional>

#include "engine_mutants.hpp"
#include "seeds.hpp"
#include "step_checkers.hpp"
#include "world_counts.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

SeedArguments arguments{20000};
constexpr std::int64_t kMutantSeeds = 20000;  // at most

sim::WorldOptions world_of(const RandomStep& step) {
  sim::WorldOptions world;
  world.duration_ns = [&](const Task& task) { return step.duration_ns(task); };
  world.latency_ns = [&](const Task& from, std::int32_t) { return step.latency_ns(from); };
  world.fifo_links = step.fifo_links();
  world.announcement_lag_ns = step.announcement_lag_ns();
  world.again_after_ns = [&](const Task& from, std::int32_t) { return step.again_after_ns(from); };
  return world;
}

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
    std::int64_t& link_ns = latest_ns[{step.rank_of(from.stage), step.rank_of(target)}];
    if (step.fifo_links()) at_ns = std::max(at_ns, link_ns);
    return link_ns = std::max(link_ns, at_ns), at_ns;
  };
  VirtualOutcome outcome = run_virtually<Engine>(used_plan, model);
  const auto meant_plan = step.plan();
  const Schedule schedule{outcome.finished, std::move(outcome.ranks),
                          std::move(outcome.peak_units)};
  return StepChecker(step, *meant_plan, schedule).verdict();
}

// What the seeds met, so that a run can show that it saw all of it.
struct Counts : WorldCounts {
  using WorldCounts::add;
  void add(const RandomStep& step, const StepPlan& plan, const sim::WorldResult& world) {
    add(step);
    of["messages"] += world.messages;
    of["reordered"] += world.reordered;
    of["duplicates"] += world.duplicates;
    of["lost"] += world.lost;
    of["limit hits"] += world.limit_hits;
    of["slack hits"] += world.slack_hits;
    of["hint waits"] += world.hint_waits;
    of["overtakes"] += world.overtakes;
    of["split steps"] += plan.split_backward();
    of["steps with chunks"] += step.num_chunks() > 1;
    of["steps with W in order"] += step.options().weight_in_order;
  }
  void print() const {
    std::string text;
    for (const auto& [name, count] : of) text += ", " + std::to_string(count) + " " + name;
    std::printf("  met%s\n", text.substr(1).c_str());
  }
};

// Empty, or what is wrong with the step of the seed, in words.
std::string run_seed(std::uint64_t seed, WorldCaps caps, Counts& counts) {
  const RandomStep step(seed, caps);
  const auto plan = step.plan();
  sim::WorldOptions world = world_of(step);
  std::int64_t num_sent = 0;
  std::optional<Task> lost;
  if (seed % 10 == 9) {
    world.is_lost = [&](const Task& from, std::int32_t) {
      if (++num_sent != static_cast<std::int64_t>(seed % 9 + 1)) return false;
      lost = from;
      return true;
    };
  }
  sim::WorldResult result = sim::simulate(plan, world);
  counts.add(step, *plan, result);
  const Schedule schedule{result.finished, std::move(result.ranks), std::move(result.peak_units)};
  const std::string wrong = StepChecker(step, *plan, schedule).verdict(lost);
  return wrong.empty() ? "" : "seed " + std::to_string(seed) + ": " + wrong + " (" + step.text() +
                                  ")";
}

// Seeds that were judged wrongly once; tests/README.md says how they come here.
struct Regression {
  const char* name;
  std::uint64_t seed;
  WorldCaps caps;
};
constexpr Regression kRegressions[] = {
    {"limits in bytes: the forward ahead gets ready in the instant of the choice", 900033618, {}},
    {"the same with two stages per rank", 901135797, {}},
};

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
  Counts counts;
  run_seeds(arguments, [&](std::uint64_t seed, WorldCaps caps) {
    return run_seed(seed, caps, counts);
  });
  counts.add(StepChecker::counts);
  counts.print();
  for (const char* part : kEveryPart) counts.of[std::string("steps with ") + part] += 0;
  if (!arguments.shows_all_counters()) return;
  for (const auto& [name, count] : counts.of) {
    if (count == 0) fail(__FILE__, __LINE__, "no seed had any " + name);
  }
}

TEST_CASE(what_was_wrong_once_stays_right) {
  Counts counts;
  for (const Regression& was : kRegressions) {
    const std::string wrong = run_seed(was.seed, was.caps, counts);
    if (!wrong.empty()) fail(__FILE__, __LINE__, std::string(was.name) + ": " + wrong);
  }
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

TEST_CASE(checkers_find_nothing_without_a_mutant) {
  for (std::int64_t i = 0; i < 2000; ++i) {
    const RandomStep step(seed() + i);
    const std::string wrong = judge<StepEngine>(step, step.plan());
    if (!wrong.empty()) fail(__FILE__, __LINE__, wrong + " (" + step.text() + ")");
  }
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
    const bool is_refused = options.hint == "order" && step.num_chunks() > 1;
    if (options.slack < 0 || is_refused) return std::string();
    ++options.slack;
    return judge<StepEngine>(step, step.plan_with(options));
  });
  find_mutant("ignores the limit", [](const RandomStep& step) {
    StepOptions options = step.options();
    if (options.slack == 0 || options.limits.empty()) return std::string();
    options.limits.assign(step.num_ranks(), step.num_microbatches() * step.num_chunks());
    return judge<StepEngine>(step, step.plan_with(options));
  });
  find_mutant("leaks one unit", [](const RandomStep& step) {
    StepOptions options = step.options();
    for (std::int32_t& limit : options.limits) ++limit;
    return judge<StepEngine>(step, step.plan_with(options));
  });
  find_mutant("weights out of order", [](const RandomStep& step) {
    StepOptions options = step.options();
    options.weight_in_order = false;
    return judge<StepEngine>(step, step.plan_with(options));
  });
  find_mutant("no reservation", [](const RandomStep& step) {
    return judge<AdmitsWithoutReservation>(step, step.plan());
  });
  find_mutant("waits for the overdue", [](const RandomStep& step) {
    return judge<WaitsForTheOverdue>(step, step.plan());
  });
  find_mutant("wrong microbatch", [](const RandomStep& step) {
    return judge<WrongMicrobatch>(step, step.plan());
  });
  find_mutant("W before I", [](const RandomStep& step) {
    return judge<WeightBeforeInput>(step, step.plan());
  });
  find_mutant("half the latency", [](const RandomStep& step) {
    return judge<StepEngine>(step, step.plan(), 0.5);
  });
}

int main(int argc, char** argv) {
  return rrfp::test::run_with(arguments, argc, argv);
}
