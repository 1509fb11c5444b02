#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/check.hpp"
#include "python/bindings.hpp"
#include "runtime/step_plan.hpp"
#include "sim/guard.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

using TaskTuple = std::tuple<std::int32_t, std::string, std::int32_t>;

TaskTuple to_tuple(const Task& task) {
  return {task.stage, std::string(1, kind_letter(task.kind)), task.microbatch};
}

Task require_task(const std::string& text) {
  const auto task = parse_task(text);
  RRFP_CHECK(task.has_value(), "'" + text + "' is not a task; write stage, kind (F, B, I or W) "
                               "and microbatch, as in 2F0.");
  return *task;
}

TaskTuple parse_text(const std::string& text) { return to_tuple(require_task(text)); }

std::shared_ptr<StepPlan> make_plan(std::shared_ptr<const StageGraph> graph,
                                    std::int32_t num_microbatches,
                                    std::vector<std::int32_t> microbatch_order, std::string hint,
                                    const std::vector<std::string>& order, std::int32_t slack,
                                    std::vector<std::int32_t> limits, bool forward_only,
                                    bool split_backward, bool weight_in_order, bool waiting,
                                    std::vector<std::int32_t> forward_in_order,
                                    std::vector<std::int32_t> input_in_order,
                                    std::vector<std::int64_t> limits_bytes,
                                    std::vector<std::vector<std::int64_t>> activation_bytes) {
  StepOptions options;
  options.num_microbatches = num_microbatches;
  options.microbatch_order = std::move(microbatch_order);
  options.hint = std::move(hint);
  for (const std::string& text : order) options.order.push_back(require_task(text));
  options.slack = slack;
  options.limits = std::move(limits);
  options.forward_only = forward_only;
  options.split_backward = split_backward;
  options.weight_in_order = weight_in_order;
  options.waiting = waiting;
  options.forward_in_order = std::move(forward_in_order);
  options.input_in_order = std::move(input_in_order);
  options.limits_bytes = std::move(limits_bytes);
  options.activation_bytes = std::move(activation_bytes);
  return std::make_shared<StepPlan>(std::move(graph), std::move(options));
}

std::vector<TaskTuple> tasks_of(const StepPlan& plan, std::int32_t rank) {
  std::vector<TaskTuple> tasks;
  for (std::int32_t local = 0; local < plan.table(rank).num_tasks(); ++local) {
    tasks.push_back(to_tuple(plan.table(rank).task(local)));
  }
  return tasks;
}

std::vector<std::string> order_of(const StepPlan& plan, std::int32_t rank) {
  std::vector<std::string> order;
  for (std::int32_t position = 0; position < plan.hint_order(rank).num_tasks(); ++position) {
    order.push_back(to_text(plan.table(rank).task(plan.hint_order(rank).local_at(position))));
  }
  return order;
}

}  // namespace

void bind_plan(py::module_& module) {
  module.attr("UNLIMITED") = kUnlimited;
  module.attr("AUTO_SLACK") = kAutoSlack;
  module.def("parse_task", &parse_text, py::arg("text"),
             "(stage, kind letter, microbatch) of a task text such as '2F0'.");

  py::class_<StageGraph, std::shared_ptr<StageGraph>>(module, "StageGraph",
                                                       "Stages, their edges and their ranks.")
      .def(py::init<std::int32_t, std::vector<std::int32_t>,
                    std::vector<std::pair<std::int32_t, std::int32_t>>,
                    std::vector<std::int32_t>>(),
           py::arg("num_ranks"), py::arg("rank_of_stage"), py::arg("edges"),
           py::arg("loss_stages"));

  py::class_<StepPlan, std::shared_ptr<StepPlan>>(module, "StepPlan",
                                                   "What all ranks of a step agree on.")
      .def(py::init(&make_plan), py::arg("graph"), py::arg("num_microbatches"),
           py::arg("microbatch_order"), py::arg("hint"), py::arg("order"), py::arg("slack"),
           py::arg("limits"), py::arg("forward_only"), py::arg("split_backward") = false,
           py::arg("weight_in_order") = false, py::arg("waiting") = true,
           py::arg("forward_in_order") = std::vector<std::int32_t>(),
           py::arg("input_in_order") = std::vector<std::int32_t>(),
           py::arg("limits_bytes") = std::vector<std::int64_t>(),
           py::arg("activation_bytes") = std::vector<std::vector<std::int64_t>>())
      .def("tasks", &tasks_of, py::arg("rank"), "The rank's tasks by the index claim() answers.")
      .def("order", &order_of, py::arg("rank"), "The rank's task texts by hint position.")
      .def_property_readonly("is_guarded", &sim::is_guarded, "Whether guard() has a say in it.")
      .def("limit_units", &StepPlan::limit_units, py::arg("rank"),
           "In-flight limit of the rank, in units.")
      .def("limit_bytes", &StepPlan::limit_bytes, py::arg("rank"),
           "In-flight limit of the rank, in bytes; UNLIMITED where units are counted.");
}

}  // namespace rrfp::python
