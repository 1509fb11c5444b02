// ControlLink: the control connections of a rank, between the moment they stand and the moment
// a runtime takes them over; what sets them up asks signal_arrived() meanwhile.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace rrfp::python {

struct ControlLink {
  std::unique_ptr<Transport> transport;
};

// For set-up on the thread that came from Python, which holds no GIL. A signal's exception
// stays set in that thread's state and is raised when the set-up has ended.
bool signal_arrived();

}  // namespace rrfp::python
