// StatusError: a Status that ended a step, on its way to Python, where it becomes
// rrfp._C.StatusError with attributes code, origin_rank and message.
#pragma once

#include <exception>
#include <utility>

#include "base/status.hpp"

namespace rrfp::python {

class StatusError : public std::exception {
 public:
  explicit StatusError(Status status) : status_(std::move(status)) {}
  const char* what() const noexcept override { return status_.message.c_str(); }
  const Status& status() const { return status_; }

 private:
  Status status_;
};

}  // namespace rrfp::python
