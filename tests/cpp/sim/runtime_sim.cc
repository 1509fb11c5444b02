// Thousands of seeded runs of the real RankRuntimes with faults; broken ones, each of which must
// be found; and the small worlds in which something was wrong once.
//
//   runtime_sim [seeds [ranks microbatches]]     20,000 seeds by default; see seeds.hpp.
#include "runtime_world.hpp"
#include "seeds.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

SeedArguments arguments{20000};
constexpr std::int64_t kMutantSeeds = 4000;

std::string run_seed(std::uint64_t seed, WorldCaps caps = {}, Mutant mutant = Mutant::kNone) {
  WorldCounts counts;
  return RuntimeWorld(seed, caps, mutant).run(counts);
}

// Worlds in which something was wrong once; tests/README.md says how they come here.
struct Regression {
  const char* name;
  std::uint64_t seed;
  WorldCaps caps;
};
constexpr Regression kRegressions[] = {
    {"a rank is lost by its silence, and every rank names it", 20260551, {3, 1}},
};

}  // namespace

TEST_CASE(every_rank_ends_alike_whatever_goes_wrong) {
  WorldCounts counts;
  run_seeds(arguments, [&](std::uint64_t seed, WorldCaps caps) {
    return RuntimeWorld(seed, caps).run(counts);
  });
  counts.add(StepChecker::counts);
  counts.of["steps with idle time judged exactly"] += IdleChecker::num_exact;
  for (const auto& [name, count] : counts.of) {
    std::printf("  %8lld %s\n", static_cast<long long>(count), name.c_str());
  }
  if (!arguments.shows_all_counters()) return;
  for (const char* part : kEveryPart) counts.of[std::string("steps with ") + part] += 0;
  for (const auto& [name, count] : counts.of) {
    if (count == 0) fail(__FILE__, __LINE__, "no seed had any " + name);
  }
  for (const char* met : {"no fault: finished", "again: finished", "again: protocol",
                          "corrupt: protocol", "foreign: protocol", "truncated: peer lost",
                          "stops: peer lost", "dies: peer lost", "never starts: timed out",
                          "task fails: stage failed", "late messages dropped", "headers refused",
                          "graphs with skips", "waits for the hint"}) {
    if (counts.of[met] == 0) fail(__FILE__, __LINE__, std::string("no seed met ") + met);
  }
}

TEST_CASE(a_run_is_a_function_of_its_seed) {
  for (std::uint64_t i = 0; i < 100; ++i) {
    WorldCounts first, second;
    CHECK(RuntimeWorld(seed() + i).run(first) == RuntimeWorld(seed() + i).run(second));
    CHECK(first.of == second.of);
  }
}

TEST_CASE(what_was_wrong_once_stays_right) {
  for (const Regression& was : kRegressions) {
    const std::string wrong = run_seed(was.seed, was.caps);
    if (!wrong.empty()) fail(__FILE__, __LINE__, std::string(was.name) + ": " + wrong);
  }
}

TEST_CASE(every_mutant_is_found) {
  const std::pair<const char*, Mutant> mutants[] = {
      {"abort forgets a waiter", Mutant::kForgetsWaiter},
      {"stale message accepted", Mutant::kStaleAccepted},
      {"wrong consumer summed", Mutant::kWrongConsumer},
      {"a message left behind", Mutant::kLeavesMessage},
      {"any header is taken", Mutant::kTakesAnyHeader},
      {"computed on arrival", Mutant::kComputedOnArrival},
      {"computed too early", Mutant::kComputedEarly},
  };
  for (const auto& [name, mutant] : mutants) {
    std::string wrong;
    std::int64_t i = 0;
    while (wrong.empty() && i < kMutantSeeds) wrong = run_seed(seed() + i++, {}, mutant);
    if (wrong.empty()) {
      fail(__FILE__, __LINE__, std::string("nothing speaks against the mutant ") + name);
    } else {
      std::printf("  mutant %-24s found after %lld seeds: %s\n", name, static_cast<long long>(i),
                  wrong.c_str());
    }
  }
}

int main(int argc, char** argv) {
  return rrfp::test::run_with(arguments, argc, argv);
}
