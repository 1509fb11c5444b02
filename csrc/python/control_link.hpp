// ControlLink: the control connections of a rank, between the moment they stand and the moment
// a runtime takes them over; what sets a rank up asks is_interrupted() meanwhile.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "comm/transport.hpp"

namespace rrfp::python {

struct ControlLink {
  std::unique_ptr<Transport> transport;
};

// For set-up on the thread that came from Python, which holds no GIL: whether a signal has arrived
// or `watch` raises. The exception stays set in that thread's state, for it to be raised when the
// set-up has ended.
bool is_interrupted(const pybind11::function& watch);

}  // namespace rrfp::python
