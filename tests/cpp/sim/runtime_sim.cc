// Thousands of seeded runs of the real RankRuntimes with faults; broken ones, each of which must
// be found; and the small worlds in which something was wrong once.
//
//   runtime_sim [seeds]     or RRFP_SEEDS; 3,000 by default. RRFP_SEED is the first one.
#include <chrono>
#include <cstdlib>

#include "check.hpp"
#include "runtime_world.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

std::int64_t num_seeds = 3000;
constexpr std::int64_t kMutantSeeds = 4000;

std::string run_seed(std::uint64_t seed, WorldCaps caps = {}, Mutant mutant = Mutant::kNone) {
  WorldCounts counts;
  return RuntimeWorld(seed, caps, mutant).run(counts);
}

// The smallest world near a failing seed that fails as well.
std::string shrunk(std::uint64_t seed) {
  const std::string whole = run_seed(seed);
  for (std::int32_t size = 2; size <= 20; ++size) {
    for (std::int32_t num_ranks = 1; num_ranks <= std::min(size, 8); ++num_ranks) {
      const WorldCaps caps{num_ranks, size - num_ranks + 1};
      for (std::uint64_t near = seed; near < seed + 40; ++near) {
        const std::string wrong = run_seed(near, caps);
        if (wrong.empty()) continue;
        return whole + "\n  shrunk to caps {" + std::to_string(caps.num_ranks) + ", " +
               std::to_string(caps.num_microbatches) + "}, " + wrong;
      }
    }
  }
  return whole;
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
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < num_seeds; ++i) {
    RuntimeWorld world(seed() + i);
    if (world.run(counts).empty()) continue;
    fail(__FILE__, __LINE__, shrunk(seed() + i));
    if (failures() >= 3) break;
  }
  const double minutes =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 60;
  std::printf("  %lld seeds, %.0f per minute\n", static_cast<long long>(num_seeds),
              static_cast<double>(num_seeds) / minutes);
  for (const auto& [name, count] : counts.of) {
    std::printf("  %8lld %s\n", static_cast<long long>(count), name.c_str());
  }
  if (num_seeds < 1000) return;
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
  if (const char* text = std::getenv("RRFP_SEEDS")) num_seeds = std::atoll(text);
  if (argc > 1 && std::atoll(argv[1]) > 0) {
    num_seeds = std::atoll(argv[1]);
    argc = 1;
  }
  return rrfp::test::run(argc, argv);
}
