#include "python/bindings.hpp"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ core of rrfp. Private: use the names of the package rrfp.";
  rrfp::python::bind_status(module);
  rrfp::python::bind_plan(module);
  rrfp::python::bind_runtime(module);
  rrfp::python::bind_agreement(module);
  rrfp::python::bind_transport(module);
  rrfp::python::bind_device(module);
  rrfp::python::bind_scheduler(module);
  rrfp::python::bind_simulation(module);
  rrfp::python::bind_build(module);
}
