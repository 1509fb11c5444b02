// How large a step can be simulated: time and memory of one. On a machine that others use, the CPU
// time is what to compare.
//
//   simulated_scale [ranks] [microbatches]     1,024 and 8,192 by default
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "sim/variability.hpp"
#include "sim/world.hpp"

using namespace rrfp;

int main(int argc, char** argv) {
  const std::int32_t num_ranks = argc > 1 ? std::atoi(argv[1]) : 1024;
  const std::int32_t num_microbatches = argc > 2 ? std::atoi(argv[2]) : 8192;
  if (num_ranks < 1 || num_microbatches < 1) {
    std::fprintf(stderr, "usage: simulated_scale [ranks] [microbatches]\n");
    return 2;
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::int32_t> ranks(num_ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  for (std::int32_t stage = 1; stage < num_ranks; ++stage) edges.emplace_back(stage - 1, stage);
  StepOptions options;
  options.num_microbatches = num_microbatches;
  const auto plan = std::make_shared<StepPlan>(
      std::make_shared<StageGraph>(num_ranks, ranks, edges, std::vector<std::int32_t>{}), options);
  // Lengths that vary by microbatch, without a table of all tasks.
  sim::WorldOptions world;
  world.duration_ns = [](const Task& task) {
    const std::int64_t share = 500 + 1000LL * ((task.microbatch * 7919) % 97) / 97;
    return sim::kUnitNs / 1000 * share * (task.kind == TaskKind::kForward ? 1 : 2);
  };
  world.latency_ns = [](const Task&, std::int32_t) { return sim::kUnitNs / 20; };
  const sim::WorldResult result = sim::simulate(plan, world);
  const std::chrono::duration<double> took_s = std::chrono::steady_clock::now() - start;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  std::printf("%d ranks, %d microbatches: %.1f s (%.1f s of CPU), %.2f GiB, makespan %.1f units, "
              "%s\n",
              num_ranks, num_microbatches, took_s.count(),
              seconds(usage.ru_utime) + seconds(usage.ru_stime),
              static_cast<double>(usage.ru_maxrss) / (1 << 20),
              static_cast<double>(result.makespan_ns) / sim::kUnitNs,
              result.finished ? "finished" : "not finished");
  return result.finished ? 0 : 1;
}
