// One function per area; module.cc calls them in this order.
#pragma once

#include <pybind11/pybind11.h>

namespace rrfp::python {

void bind_status(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_runtime(pybind11::module_& module);
void bind_agreement(pybind11::module_& module);
void bind_transport(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_scheduler(pybind11::module_& module);
void bind_simulation(pybind11::module_& module);
void bind_build(pybind11::module_& module);

}  // namespace rrfp::python
