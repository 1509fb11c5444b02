// Draws steps from the variability models, for others to reproduce: durations and latencies in
// microseconds, a step to a line, as benchmarks/step_draws.py reads them.
//
//   step_draws > draws.jsonl
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "sim/variability.hpp"

using namespace rrfp;
using namespace rrfp::sim;

namespace {

constexpr std::int32_t kStages = 4;
constexpr std::int32_t kMicrobatches = 16;
constexpr int kSeeds = 3;
constexpr double kUnitMs = 20;  // of the jitters: what F takes

template <class Number>
void print_row(const char* name, const std::vector<Number>& values, const char* format) {
  std::printf(", \"%s\": [", name);
  for (std::size_t at = 0; at < values.size(); ++at) {
    std::printf(at == 0 ? "" : ",");
    std::printf(format, values[at]);
  }
  std::printf("]");
}

// By stage and microbatch.
template <class ValueNs>
std::vector<long long> table_us(TaskKind kind, ValueNs value_ns) {
  std::vector<long long> table;
  for (std::int32_t at = 0; at < kStages * kMicrobatches; ++at) {
    const Task task{at / kMicrobatches, kind, at % kMicrobatches};
    table.push_back(std::llround(static_cast<double>(value_ns(task)) / 1000));
  }
  return table;
}

void print_draw(const Variability& model, std::uint64_t seed) {
  const StepDraw draw(model, kStages, kMicrobatches, seed);
  std::printf("{\"model\": \"%s\", \"seed\": %d, \"stages\": %d, \"microbatches\": %d",
              model.name.c_str(), static_cast<int>(seed), kStages, kMicrobatches);
  const auto duration_ns = [&](const Task& task) { return draw.duration_ns(task); };
  const auto latency_ns = [&](const Task& task) { return draw.latency_ns(task); };
  print_row("F", table_us(TaskKind::kForward, duration_ns), "%lld");
  print_row("B", table_us(TaskKind::kBackward, duration_ns), "%lld");
  print_row("I", table_us(TaskKind::kInputGrad, duration_ns), "%lld");
  print_row("W", table_us(TaskKind::kWeightGrad, duration_ns), "%lld");
  print_row("latency_F", table_us(TaskKind::kForward, latency_ns), "%lld");
  print_row("latency_B", table_us(TaskKind::kBackward, latency_ns), "%lld");
  print_row("costs", draw.costs(), "%.3f");
  std::printf("}\n");
}

}  // namespace

int main() {
  std::vector<Variability> models = scored_variabilities();
  for (const Variability& jitter : jitters(kUnitMs)) models.push_back(jitter);
  for (const Variability& model : models) {
    for (int seed = 1; seed <= kSeeds; ++seed) print_draw(model, seed);
  }
  return 0;
}
