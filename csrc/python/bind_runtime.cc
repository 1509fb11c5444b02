#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "python/bindings.hpp"
#include "python/gil.hpp"
#include "python/inbound.hpp"
#include "python/runtime_handle.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

py::object status_tuple(const RuntimeHandle& runtime) {
  const Status status = runtime.status();
  if (status.ok()) return py::none();
  return py::make_tuple(status.code, status.origin_rank, status.message);
}

void bind_step_times(py::module_& module) {
  py::class_<StepTimes>(module, "StepTimes", "Where a rank's wall time went, in ns.")
      .def_readonly("wall_ns", &StepTimes::wall_ns)
      .def_readonly("compute_ns", &StepTimes::compute_ns)
      .def_readonly("idle_warmup_ns", &StepTimes::idle_warmup_ns)
      .def_readonly("idle_input_ns", &StepTimes::idle_input_ns)
      .def_readonly("idle_transfer_ns", &StepTimes::idle_transfer_ns)
      .def_readonly("idle_limit_ns", &StepTimes::idle_limit_ns)
      .def_readonly("idle_slack_ns", &StepTimes::idle_slack_ns)
      .def_readonly("idle_agreement_ns", &StepTimes::idle_agreement_ns)
      .def_readonly("host_ns", &StepTimes::host_ns)
      .def_readonly("transfer_from_ns", &StepTimes::transfer_from_ns,
                    "idle_transfer_ns by the rank whose message it was.");
}

void bind_lookahead(py::module_& module) {
  py::enum_<Lookahead>(module, "Lookahead", "When the next task for a device is chosen.")
      .value("NONE", Lookahead::kNone, "When it has ended all others.")
      .value("EAGER", Lookahead::kEager, "When one is unfinished.")
      .value("JIT", Lookahead::kJit, "When that one should end in as long as a launch takes.");
}

}  // namespace

void bind_runtime(py::module_& module) {
  module.attr("CLAIMED_NOTHING") = RuntimeHandle::kClaimedNothing;
  module.attr("ALL_CLAIMED") = RuntimeHandle::kAllClaimed;

  py::class_<Inbound>(module, "Inbound", "A received message; its payload lives with its tensors.")
      .def_property_readonly("metadata", &Inbound::metadata)
      .def("capsules", &Inbound::capsules, py::arg("layouts"),
           "DLPack capsules for (type code, bits, shape) of each tensor, in order.");

  bind_step_times(module);
  bind_lookahead(module);

  py::class_<RuntimeHandle>(module, "Runtime", "One rank of one pipeline, across its steps.")
      .def_property_readonly("rank", &RuntimeHandle::rank)
      .def_property_readonly("num_ranks", &RuntimeHandle::num_ranks)
      .def_property_readonly("transport_name", &RuntimeHandle::transport_name)
      .def_property_readonly("shares_address_space", &RuntimeHandle::shares_address_space)
      .def_property_readonly("status", &status_tuple, "(code, origin_rank, message), or None.")
      .def("begin_step", &RuntimeHandle::begin_step, py::arg("plan"), py::arg("step"),
           py::arg("stall_timeout_ms"), "Makes the step current.")
      .def("take_turns", &RuntimeHandle::take_turns, py::arg("is_on"),
           "Whether the ranks of this process run their tasks in turn in the coming step.")
      .def("claim", &RuntimeHandle::claim, py::arg("timeout_ms"),
           "Waits for a task: its index, CLAIMED_NOTHING or ALL_CLAIMED. Raises StatusError.")
      .def("take_inputs", &RuntimeHandle::take_inputs, py::arg("local"),
           "Per input of a claimed task: None, the attached object, or an Inbound.")
      .def("post_object", &RuntimeHandle::post_object, py::arg("local"), py::arg("target_stage"),
           py::arg("object"), "Hands an object to a stage of this process, as it is.")
      .def("post_tensors", &RuntimeHandle::post_tensors, py::arg("local"),
           py::arg("target_stage"), py::arg("metadata"), py::arg("segments"), py::arg("owner"),
           "Sends metadata and memory, kept alive by owner, to the rank of a stage.")
      .def_property_readonly("device", &RuntimeHandle::device, "Index of its GPU; -1: the CPU.")
      .def("bind_stream", &RuntimeHandle::bind_stream, py::arg("stream"), py::arg("lookahead"),
           "The CUDA stream that the coming step is launched on, and how far ahead.")
      .def("wait_launched", &RuntimeHandle::wait_launched, py::arg("timeout_ms"),
           "After a launch: waits until the next task may be chosen. False when the device has "
           "not ended the tasks before it by the time-out; raises StatusError.")
      .def("retire", &RuntimeHandle::retire, py::arg("local"), "The claimed task is done.")
      .def("wait_sends", &RuntimeHandle::wait_sends, py::arg("timeout_ms"),
           "Whether everything posted has been sent. Raises StatusError.")
      .def("end_step", &RuntimeHandle::end_step, "Ends the step and answers its StepTimes.")
      .def("records", &RuntimeHandle::records,
           "(text, ready_ns, claimed_ns, retired_ns, overtaken) of the last step, as claimed.")
      .def_property_readonly("peak_units", &RuntimeHandle::peak_units)
      .def("send_control", &RuntimeHandle::send_control, py::arg("peer"), py::arg("body"))
      .def("recv_control", &RuntimeHandle::recv_control, py::arg("peer"), py::arg("timeout_ms"),
           py::arg("is_tying") = false,  // it waits for tied gradients, as others are told
           "The next blob of the peer, or None at the time-out. Raises StatusError.")
      .def("exchange_cards", &RuntimeHandle::exchange_cards, py::arg("card"),
           py::arg("timeout_ms"),
           "The cards of all members of the agreement group, or None. Raises StatusError.")
      .def("owing_members", &RuntimeHandle::owing_members,
           "Members that have not given their card, in words.")
      .def_property_readonly("agreement_digest", &RuntimeHandle::agreement_digest,
                             "The same on every member after the same step.")
      .def("abort", &RuntimeHandle::abort, py::arg("code"), py::arg("origin_rank"),
           py::arg("message"), py::arg("tell_peers") = true,
           py::call_guard<GilRelease>(), "Ends the step on every rank; any thread.")
      .def("describe", &RuntimeHandle::describe, "What each rank was last known to be doing.")
      .def("views", &RuntimeHandle::views, "The same as dictionaries, by rank, with decisions.")
      .def("close", &RuntimeHandle::close, py::arg("timeout_ms"),
           "Says goodbye and lets what is outstanding go.")
      .def("end", &RuntimeHandle::end, py::arg("timeout_ms"), "close(), and gives up the device.")
      .def("drain", &RuntimeHandle::drain, "Drops every message that no task took.");
}

}  // namespace rrfp::python
