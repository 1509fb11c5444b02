#include <pybind11/pybind11.h>

#include "python/bindings.hpp"
#include "python/build_info.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

py::dict build_info_dict() {
  const BuildInfo info = build_info();
  py::dict result;
  result["version"] = info.version;
  result["compiler"] = info.compiler;
  result["build_type"] = info.build_type;
  result["sanitizer"] = info.sanitizer;
  result["pybind11"] = info.pybind11;
  result["cmake"] = info.cmake;
  result["cuda"] = info.cuda;
  result["cuda_version"] = info.cuda_version;
  result["cuda_refusal"] = info.cuda_refusal;
  result["nvtx"] = info.nvtx;
  return result;
}

}  // namespace

void bind_build(py::module_& module) {
  module.def("build_info", &build_info_dict, "What this build can do, and what built it.");
}

}  // namespace rrfp::python
