#include <pybind11/pybind11.h>

#include "base/status.hpp"
#include "python/bindings.hpp"
#include "python/status_error.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

PyObject* g_status_error = nullptr;  // the Python class; lives as long as the module

void raise_status_error(const Status& status) {
  py::object error = py::reinterpret_borrow<py::object>(g_status_error)(status.message);
  error.attr("code") = status.code;
  error.attr("origin_rank") = status.origin_rank;
  error.attr("message") = status.message;
  PyErr_SetObject(g_status_error, error.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const StatusError& error) {
    raise_status_error(error.status());
  }
}

}  // namespace

void bind_status(py::module_& module) {
  py::enum_<StatusCode>(module, "StatusCode", "What ended a step.")
      .value("STAGE_FAILED", StatusCode::kStageFailed)
      .value("PEER_LOST", StatusCode::kPeerLost)
      .value("STALLED", StatusCode::kStalled)
      .value("PROTOCOL", StatusCode::kProtocol)
      .value("INTERRUPTED", StatusCode::kInterrupted)
      .value("CLOSED", StatusCode::kClosed)
      .value("TIMED_OUT", StatusCode::kTimedOut)
      .value("DEVICE_FAILED", StatusCode::kDeviceFailed);

  g_status_error = PyErr_NewExceptionWithDoc(
      "rrfp._C.StatusError",
      "A step ended early. Attributes: code (StatusCode), origin_rank, message.",
      PyExc_RuntimeError, nullptr);
  if (g_status_error == nullptr) throw py::error_already_set();
  module.add_object("StatusError", py::reinterpret_borrow<py::object>(g_status_error));
  py::register_exception_translator(&translate);
}

}  // namespace rrfp::python
