#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/check.hpp"
#include "comm/local_transport.hpp"
#include "comm/socket_interface.hpp"
#include "comm/socket_transport.hpp"
#include "python/agreement_handle.hpp"
#include "python/bindings.hpp"
#include "python/control_link.hpp"
#include "python/gil.hpp"
#include "python/runtime_handle.hpp"
#include "python/status_error.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

std::vector<std::unique_ptr<RuntimeHandle>> make_local_runtimes(std::int32_t num_ranks,
                                                                std::uint64_t run,
                                                                std::int64_t spin_us,
                                                                bool spin_yields) {
  RuntimeOptions options;
  options.run = run;
  options.spin_us = spin_us;
  options.spin_yields = spin_yields;
  const auto turn = std::make_shared<WorkTurn>();
  std::vector<std::unique_ptr<RuntimeHandle>> runtimes;
  for (auto& transport : make_local_transports(num_ranks)) {
    runtimes.push_back(std::make_unique<RuntimeHandle>(std::move(transport), options));
    runtimes.back()->share_turn(turn);
  }
  return runtimes;
}

ControlLink connect_control(SocketListener& listener, std::int32_t rank,
                            std::vector<std::string> addresses, const std::string& token,
                            std::uint64_t run, std::int64_t timeout_ms,
                            const py::function& watch) {
  SocketSetup setup;
  RRFP_CHECK(token.size() == setup.token.size(), "the run token must have 32 bytes.");
  std::transform(token.begin(), token.end(), setup.token.begin(),
                 [](char c) { return static_cast<std::byte>(c); });
  setup.rank = rank;
  setup.addresses = std::move(addresses);
  setup.run = run;
  setup.timeout_ms = timeout_ms;
  setup.interrupted = [&watch] { return is_interrupted(watch); };
  Status status;
  ControlLink link;
  {
    const GilRelease nogil;
    link.transport = connect_sockets(listener, setup, &status);
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (link.transport == nullptr) throw StatusError(status);
  return link;
}

std::unique_ptr<RuntimeHandle> join_control(ControlLink& control, std::uint64_t run,
                                            std::int64_t heartbeat_ms,
                                            std::int64_t peer_timeout_ms, std::int64_t spin_us,
                                            bool spin_yields, AgreementHandle* agreement) {
  RRFP_CHECK(control.transport != nullptr, "these control connections are in use already.");
  RuntimeOptions options{run, heartbeat_ms, peer_timeout_ms, spin_us, spin_yields};
  options.worker_moves_messages = true;
  return std::make_unique<RuntimeHandle>(std::move(control.transport), options, nullptr,
                                         agreement != nullptr ? agreement->take() : nullptr);
}

void set_spin_us(std::int64_t spin_us) { ProgressThread::instance().set_spin_us(spin_us); }

}  // namespace

bool is_interrupted(const py::function& watch) {
  const GilAcquire gil;
  if (PyErr_CheckSignals() != 0) return true;
  try {
    watch();
  } catch (py::error_already_set& error) {
    error.restore();
  }
  return PyErr_Occurred() != nullptr;
}

void bind_transport(py::module_& module) {
  module.def("make_local_runtimes", &make_local_runtimes, py::arg("num_ranks"), py::arg("run"),
             py::arg("spin_us"), py::arg("spin_yields"),
             "Ranks that are threads of this process.");
  py::class_<SocketListener>(module, "SocketListener", "Where peers of this rank connect to.")
      .def(py::init<const std::string&, bool>(), py::arg("host") = "",
           py::arg("with_unix") = true)
      .def_property_readonly("address", &SocketListener::address);
  module.def("choose_host", &choose_host, py::arg("master"), py::arg("interfaces"),
             py::call_guard<GilRelease>(),
             "The address of this host that other ranks are told.");
  py::class_<ControlLink>(module, "ControlLink", "Connections that no runtime uses yet.");
  module.def("connect_control", &connect_control, py::arg("listener"), py::arg("rank"),
             py::arg("addresses"), py::arg("token"), py::arg("run"), py::arg("timeout_ms"),
             py::arg("watch"),
             "Joins the ranks at `addresses`; waits without the GIL, and calls `watch` several "
             "times a second, which may raise. Raises StatusError.");
  module.def("join_control", &join_control, py::arg("control"), py::arg("run"),
             py::arg("heartbeat_ms"), py::arg("peer_timeout_ms"), py::arg("spin_us"),
             py::arg("spin_yields"), py::arg("agreement") = nullptr,
             "The runtime of a rank on the CPU, out of its connections.");
  module.def("set_spin_us", &set_spin_us, py::arg("spin_us"),
             "How long the progress thread spins before it sleeps.");
}

}  // namespace rrfp::python
