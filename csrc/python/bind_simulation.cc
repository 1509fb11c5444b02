#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "python/bindings.hpp"
#include "python/gil.hpp"
#include "sim/guard.hpp"
#include "sim/world.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

// What the ranks of simulated steps have learnt, for the next one.
struct LearntTimes {
  LearntTimes(std::int32_t num_ranks, std::int32_t num_chunks)
      : by_rank(num_ranks, TaskTimes(num_chunks)) {}
  std::vector<TaskTimes> by_rank;
};

// Tables are indexed [kind F 0, B 1; split: F 0, I 1, W 2][stage][microbatch], flattened.
sim::WorldResult simulate(std::shared_ptr<StepPlan> plan, std::vector<std::int64_t> durations_ns,
                          std::vector<std::int64_t> latencies_ns, bool fifo_links,
                          LearntTimes* times) {
  const std::int32_t num_stages = plan->graph().num_stages();
  const std::int32_t num_microbatches = plan->num_microbatches();
  const std::size_t num_kinds = plan->split_backward() ? 3 : 2;
  const std::size_t num_entries = num_kinds * num_stages * num_microbatches;
  RRFP_CHECK(durations_ns.size() == num_entries && latencies_ns.size() == num_entries,
             "durations and latencies need one entry per kind, stage and microbatch: " +
                 std::to_string(num_entries) + ", got " + std::to_string(durations_ns.size()) +
                 " and " + std::to_string(latencies_ns.size()));
  const auto entry = [=](const Task& task) {
    const std::size_t kind = task.kind == TaskKind::kForward      ? 0
                             : task.kind == TaskKind::kWeightGrad ? 2
                                                                  : 1;
    return (kind * num_stages + task.stage) * num_microbatches + task.microbatch;
  };
  sim::WorldOptions options;
  options.duration_ns = [&](const Task& task) { return durations_ns[entry(task)]; };
  options.latency_ns = [&](const Task& from, std::int32_t) { return latencies_ns[entry(from)]; };
  options.fifo_links = fifo_links;
  RRFP_CHECK(times == nullptr || static_cast<std::int32_t>(times->by_rank.size()) ==
                                     plan->graph().num_ranks(),
             "learnt times need one entry per rank of the plan");
  if (times != nullptr) options.times = &times->by_rank;
  return sim::simulate(std::move(plan), options);
}

// (num_microbatches, durations_ns, travels_ns, costs); see StepRecord.
using RecordTuple = std::tuple<std::int32_t, std::vector<std::int64_t>, std::vector<std::int64_t>,
                               std::vector<double>>;

// The (hint, slack) that the guard chooses for the step.
std::pair<std::string, std::int32_t> guard(std::shared_ptr<StepPlan> plan,
                                           const std::vector<RecordTuple>& last_steps,
                                           const std::vector<double>& costs, std::uint64_t seed) {
  std::vector<sim::StepRecord> records;
  for (const auto& [num_microbatches, durations_ns, travels_ns, known_costs] : last_steps) {
    records.push_back({num_microbatches, durations_ns, travels_ns, known_costs});
  }
  const auto chosen = sim::guarded_plan(plan, sim::guard(plan, records, costs, seed));
  return {chosen->options().hint, chosen->options().slack};
}

std::vector<std::vector<std::tuple<std::string, std::int64_t, std::int64_t>>> ranks_of(
    const sim::WorldResult& result) {
  std::vector<std::vector<std::tuple<std::string, std::int64_t, std::int64_t>>> ranks;
  for (const auto& tasks : result.ranks) {
    auto& rank = ranks.emplace_back();
    for (const auto& task : tasks) {
      rank.emplace_back(to_text(task.task), task.start_ns, task.end_ns);
    }
  }
  return ranks;
}

}  // namespace

void bind_simulation(py::module_& module) {
  py::class_<sim::WorldResult>(module, "WorldResult", "A step in virtual time.")
      .def_readonly("finished", &sim::WorldResult::finished)
      .def_readonly("makespan_ns", &sim::WorldResult::makespan_ns)
      .def_property_readonly("ranks", &ranks_of, "Per rank (text, start_ns, end_ns), as run.")
      .def_readonly("peak_units", &sim::WorldResult::peak_units)
      .def_readonly("messages", &sim::WorldResult::messages)
      .def_readonly("overtakes", &sim::WorldResult::overtakes);
  py::class_<LearntTimes>(module, "LearntTimes", "What simulated ranks learn over steps.")
      .def(py::init<std::int32_t, std::int32_t>(), py::arg("num_ranks"), py::arg("num_chunks"));
  module.def("simulate", &simulate, py::arg("plan"), py::arg("durations_ns"),
             py::arg("latencies_ns"), py::arg("fifo_links"), py::arg("times") = nullptr,
             py::call_guard<GilRelease>(), "Runs the plan on a virtual clock.");
  module.def("guard", &guard, py::arg("plan"), py::arg("last_steps"), py::arg("costs"),
             py::arg("seed"), py::call_guard<GilRelease>(),
             "(hint, slack) for a guarded step, from (num_microbatches, durations_ns, travels_ns, "
             "costs) of the last eight; by kind F, B, I, W, stage, microbatch; -1: no such task.");
}

}  // namespace rrfp::python
