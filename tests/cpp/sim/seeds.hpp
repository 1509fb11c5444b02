// How the programs of the simulated world go through their seeds: so many, or one replayed; a
// seed that fails is shrunk to the smallest world near it that fails as well.
//
//   <program> [seeds [ranks microbatches]]   the last two are the largest world drawn.
//   RRFP_SEED: the first seed. RRFP_SEEDS: how many.
#pragma once

#include <errno.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>

#include "check.hpp"
#include "random_step.hpp"

namespace rrfp::test {

struct SeedArguments {
  std::int64_t num_seeds;
  WorldCaps caps = {};
  bool shows_all_counters() const { return num_seeds >= 1000 && failures() == 0; }
};

// Of the program; what is left of argv goes to run().
inline int run_with(SeedArguments& arguments, int argc, char** argv) {
  if (const char* text = std::getenv("RRFP_SEEDS")) arguments.num_seeds = std::atoll(text);
  const bool has_number = argc > 1 && std::atoll(argv[1]) > 0;
  if (has_number) arguments.num_seeds = std::atoll(argv[1]);
  if (has_number && argc > 3) {
    arguments.caps = {std::max(1, std::atoi(argv[2])), std::max(1, std::atoi(argv[3]))};
  }
  return run(has_number ? 1 : argc, argv);
}

// Of one seed within caps: empty, or what is wrong.
using RunSeed = std::function<std::string(std::uint64_t seed, WorldCaps caps)>;

inline std::string attempt(const RunSeed& run_seed, std::uint64_t seed, WorldCaps caps) {
  try {
    return run_seed(seed, caps);
  } catch (const std::exception& error) {
    return "seed " + std::to_string(seed) + " threw: " + error.what();
  }
}

inline std::string replay_text(std::uint64_t seed, WorldCaps caps) {
  return "\n  replay: RRFP_SEED=" + std::to_string(seed) + " " + program_invocation_short_name +
         " 1 " + std::to_string(caps.num_ranks) + " " + std::to_string(caps.num_microbatches);
}

// The smallest world near a failing seed that fails as well, and how to see it again.
inline std::string shrunk(std::uint64_t seed, WorldCaps largest, const RunSeed& run_seed) {
  for (std::int32_t size = 2; size <= 20; ++size) {
    for (std::int32_t num_ranks = 1; num_ranks <= std::min(size, 8); ++num_ranks) {
      const WorldCaps caps{num_ranks, size - num_ranks + 1};
      if (num_ranks > largest.num_ranks || caps.num_microbatches > largest.num_microbatches) {
        continue;
      }
      for (std::uint64_t near = seed; near < seed + 40; ++near) {
        const std::string wrong = attempt(run_seed, near, caps);
        if (!wrong.empty()) return "\n  shrunk: " + wrong + replay_text(near, caps);
      }
    }
  }
  return "";
}

// Runs all seeds, or as many as it takes to see three fail.
inline void run_seeds(const SeedArguments& arguments, const RunSeed& run_seed) {
  const auto start = std::chrono::steady_clock::now();
  std::int64_t num_run = 0;
  for (int num_failed = 0; num_run < arguments.num_seeds && num_failed < 3; ++num_run) {
    const std::uint64_t one = seed() + num_run;
    const std::string wrong = attempt(run_seed, one, arguments.caps);
    if (wrong.empty()) continue;
    ++num_failed;
    fail(__FILE__, __LINE__,
         wrong + replay_text(one, arguments.caps) + shrunk(one, arguments.caps, run_seed) +
             "\n  found by a run from");
  }
  const std::chrono::duration<double> took_s = std::chrono::steady_clock::now() - start;
  std::printf("  %lld seeds in %.1f s, %.0f per minute\n", static_cast<long long>(num_run),
              took_s.count(), 60 * static_cast<double>(num_run) / took_s.count());
}

}  // namespace rrfp::test
