#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "device/cuda_support.hpp"
#include "python/agreement_handle.hpp"
#include "python/bindings.hpp"
#include "python/control_link.hpp"
#include "python/device_link.hpp"
#include "python/gil.hpp"
#include "python/runtime_handle.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

// A process with a GPU has cores to spare, and while its worker is idle so is the GPU: it looks
// for the next task without sleeping, because to be woken costs more than to be told.
constexpr std::int64_t kWorkerSpinUs = 20000;

py::dict cuda_support_dict() {
  const CudaSupport support = cuda_support();
  py::dict result;
  result["is_built"] = support.is_built;
  result["runtime_version"] = support.runtime_version;
  result["driver_version"] = support.driver_version;
  result["num_devices"] = support.num_devices;
  result["refusal"] = support.refusal;
  return result;
}

std::string open_link(DeviceLink& link, const std::vector<std::string>& addresses,
                      std::int64_t timeout_ms, const py::function& watch) {
  std::string refusal;
  {
    const GilRelease nogil;
    refusal = link.open(addresses, timeout_ms, [&watch] { return is_interrupted(watch); });
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return refusal;
}

std::unique_ptr<RuntimeHandle> join_device(ControlLink& control, DeviceLink& link,
                                           std::uint64_t run, std::int64_t heartbeat_ms,
                                           std::int64_t peer_timeout_ms,
                                           AgreementHandle* agreement) {
  RRFP_CHECK(control.transport != nullptr, "these control connections are in use already.");
  DeviceRank rank = link.join(std::move(control.transport), peer_timeout_ms);
  RuntimeOptions options{run, heartbeat_ms, peer_timeout_ms};
  options.spin_us = kWorkerSpinUs;
  return std::make_unique<RuntimeHandle>(std::move(rank.transport), options,
                                         std::move(rank.stream),
                                         agreement != nullptr ? agreement->take() : nullptr);
}

std::vector<std::unique_ptr<RuntimeHandle>> make_device_runtimes(const std::vector<int>& devices,
                                                                 std::uint64_t run,
                                                                 std::int64_t timeout_ms,
                                                                 std::int64_t peer_timeout_ms) {
  RuntimeOptions options;
  options.run = run;
  options.peer_timeout_ms = peer_timeout_ms;
  std::vector<DeviceRank> ranks;
  {
    const GilRelease nogil;
    ranks = make_device_ranks(devices, run, timeout_ms, peer_timeout_ms);
  }
  std::vector<std::unique_ptr<RuntimeHandle>> runtimes;
  for (DeviceRank& rank : ranks) {
    runtimes.push_back(std::make_unique<RuntimeHandle>(std::move(rank.transport), options,
                                                       std::move(rank.stream)));
  }
  return runtimes;
}

}  // namespace

void bind_device(py::module_& module) {
  module.def("cuda_support", &cuda_support_dict,
             "What CUDA can do here. Starts the driver: a process forked later cannot use it.");
  py::class_<DeviceLink>(module, "DeviceLink", "A rank's way to the devices of its peers.")
      .def_property_readonly("address", &DeviceLink::address)
      .def("open", &open_link, py::arg("addresses"), py::arg("timeout_ms"), py::arg("watch"),
           "Opens it with the addresses of all ranks: '' or why that is not possible. `watch` is "
           "called several times a second, and may raise.");
  module.def("ipc_link", &make_ipc_link, py::arg("rank"), py::arg("num_ranks"), py::arg("device"),
             py::arg("follows_streams"),
             "Copy engines between the devices of one host; streams may wait for messages.");
  module.def("nccl_link", &make_nccl_link, py::arg("rank"), py::arg("edges"), py::arg("device"),
             "NCCL; edges are (source rank, target rank), the same on all ranks.");
  module.def("join_device", &join_device, py::arg("control"), py::arg("link"), py::arg("run"),
             py::arg("heartbeat_ms"), py::arg("peer_timeout_ms"), py::arg("agreement") = nullptr,
             "The runtime of a rank with a device, out of its connections and an open link.");
  module.def("make_device_runtimes", &make_device_runtimes, py::arg("devices"), py::arg("run"),
             py::arg("timeout_ms"), py::arg("peer_timeout_ms"),
             "Ranks that are threads of this process, each on its device.");
}

}  // namespace rrfp::python
