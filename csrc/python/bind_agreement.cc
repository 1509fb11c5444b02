#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "python/agreement_handle.hpp"
#include "python/bindings.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

std::unique_ptr<AgreementHandle> create(std::int32_t num_members, std::uint64_t nonce) {
  return std::make_unique<AgreementHandle>(AgreementSegment::create(num_members, nonce));
}

std::unique_ptr<AgreementHandle> open(std::int32_t pid, int fd, std::int32_t num_members,
                                      std::uint64_t nonce) {
  std::string refusal;
  auto segment = AgreementSegment::open(pid, fd, num_members, nonce, &refusal);
  RRFP_CHECK(segment != nullptr, refusal);
  return std::make_unique<AgreementHandle>(std::move(segment));
}

}  // namespace

void bind_agreement(py::module_& module) {
  module.attr("MAX_AGREEMENT_CARD_BYTES") = kMaxCardBytes;
  py::class_<AgreementHandle>(module, "AgreementSegment",
                              "Memory that the members of an agreement group share.")
      .def_property_readonly("fd", &AgreementHandle::fd)
      .def("sign", &AgreementHandle::sign, py::arg("member"), py::arg("token"))
      .def("is_signed", &AgreementHandle::is_signed, py::arg("member"), py::arg("token"),
           "Whether the member has signed this very memory.")
      .def("join", &AgreementHandle::join, py::arg("member"), py::arg("names"), py::arg("pids"),
           "Every member has it: from here on it needs no name.");
  module.def("make_agreement_segment", &create, py::arg("num_members"), py::arg("nonce"),
             "Makes it; the others open it by this process's id and its fd.");
  module.def("open_agreement_segment", &open, py::arg("pid"), py::arg("fd"),
             py::arg("num_members"), py::arg("nonce"),
             "Raises ValueError when it is not there or not the one that was meant.");
}

}  // namespace rrfp::python
