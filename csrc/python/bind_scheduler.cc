#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "python/bindings.hpp"
#include "python/gil.hpp"
#include "runtime/own_tasks.hpp"

namespace py = pybind11;

namespace rrfp::python {

void bind_scheduler(py::module_& module) {
  module.def("circle_of_tasks", &circle_of_tasks, py::arg("after"),
             "Tasks that wait for one another in a circle; empty: there are none.");

  py::class_<OwnTasks>(module, "OwnTasks", "One run over a graph of tasks, for several threads.")
      .def(py::init<const std::vector<std::vector<std::int32_t>>&,
                    const std::vector<std::int32_t>&, std::int32_t>(),
           py::arg("after"), py::arg("order"), py::arg("slack"))
      .def_readonly_static("NOTHING", &OwnTasks::kNothing)
      .def_readonly_static("DONE", &OwnTasks::kDone)
      .def_readonly_static("ENDED", &OwnTasks::kEnded)
      .def("first_ready", &OwnTasks::first_ready, "Tasks that wait for nothing, by position.")
      .def("arrive", &OwnTasks::arrive, py::arg("task"),
           py::call_guard<GilRelease>(), "The task may be claimed.")
      .def("claim", &OwnTasks::claim, py::arg("timeout_ms"),
           py::call_guard<GilRelease>(),
           "Waits for a task: its index, NOTHING at the time-out, DONE or ENDED.")
      .def("retire", &OwnTasks::retire, py::arg("task"),
           "The claimed task has run; answers the tasks that are ready now.")
      .def("end", &OwnTasks::end, py::call_guard<GilRelease>(),
           "No further task is claimed.");
}

}  // namespace rrfp::python
