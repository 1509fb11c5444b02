// Thousands of seeded steps of the simulated world, each judged by checkers that share no code
// with the engine; and broken engines, each of which the checkers must find.
//
//   pipeline_sim [seeds]     or RRFP_SEEDS; 20,000 by default. RRFP_SEED is the first one.
#include <chrono>
#include <cstdlib>
#include <functional>
#include <optional>

#include "check.hpp"
#include "engine_mutants.hpp"
#include "random_step.hpp"
#include "step_checkers.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

std::int64_t num_seeds = 20000;
constexpr std::int64_t kMutantSeeds = 2000;

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
// step as it was meant. `spoil` may change the schedule that is judged.
template <class Engine>
std::string judge(const RandomStep& step, std::shared_ptr<const StepPlan> used_plan,
                  double share_of_latency = 1.0,
                  const std::function<void(Schedule&)>& spoil = {}) {
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
  Schedule schedule{outcome.finished, std::move(outcome.ranks), std::move(outcome.peak_units)};
  if (spoil) spoil(schedule);
  return StepChecker(step, *meant_plan, schedule).verdict();
}

// Exchanges the places of the first W and its I. The W takes its own time there, so that nothing
// but its missing input speaks against it.
void run_weight_first(const RandomStep& step, Schedule& schedule) {
  for (auto& ran : schedule.ranks) {
    const auto weight = std::find_if(ran.begin(), ran.end(), [](const VirtualTask& task) {
      return task.task.kind == TaskKind::kWeightGrad;
    });
    if (weight == ran.end()) continue;
    const Task input_grad{weight->task.stage, TaskKind::kInputGrad, weight->task.microbatch};
    const auto before = std::find_if(ran.begin(), ran.end(), [&](const VirtualTask& task) {
      return task.task == input_grad;
    });
    std::swap(before->task, weight->task);
    before->end_ns = before->start_ns + step.duration_ns(before->task);
    return;
  }
}

// What the seeds met, so that a run can show that it saw all of it.
struct Counts {
  std::map<std::string, std::int64_t> of;
  void add(const RandomStep& step, const StepPlan& plan, const sim::WorldResult& world) {
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
  void add(const AdmissionCounts& admission) {
    of["admitted by level"] += admission.levelled;
    of["admitted as the earliest"] += admission.earliest;
    of["admitted beside the earliest"] += admission.not_earliest;
    of["held back by level"] += admission.levelled_held;
    of["held back for the earliest"] += admission.not_earliest_held;
    of["admitted by bytes"] += admission.bytes;
    of["held back by bytes"] += admission.bytes_held;
  }
  void print() const {
    std::string text;
    for (const auto& [name, count] : of) text += ", " + std::to_string(count) + " " + name;
    std::printf("  %lld seeds%s\n", static_cast<long long>(num_seeds), text.c_str());
  }
};

// Empty, or what is wrong with the step of the seed, in words.
std::string run_seed(std::uint64_t seed, bool loses_a_message, Counts& counts) {
  const RandomStep step(seed);
  const auto plan = step.plan();
  sim::WorldOptions world = world_of(step);
  std::int64_t num_sent = 0;
  std::optional<Task> lost;
  if (loses_a_message) {
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
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < num_seeds; ++i) {
    const std::string wrong = run_seed(seed() + i, i % 10 == 9, counts);
    if (!wrong.empty()) fail(__FILE__, __LINE__, wrong);
  }
  const std::chrono::duration<double> took_s = std::chrono::steady_clock::now() - start;
  std::printf("  %.0f seeds per minute\n", 60 * static_cast<double>(num_seeds) / took_s.count());
  counts.add(StepChecker::counts);
  counts.print();
  for (const auto& [name, count] : counts.of) {
    if (count == 0 && num_seeds >= 1000) fail(__FILE__, __LINE__, "no seed had any " + name);
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
    if (options.slack < 0) return std::string();
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
    return judge<StepEngine>(step, step.plan(), 1.0,
                             [&](Schedule& schedule) { run_weight_first(step, schedule); });
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
