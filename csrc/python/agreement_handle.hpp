// AgreementHandle: an AgreementSegment as Python holds it while a group is set up; connect()
// takes the segment out.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "comm/agreement_segment.hpp"

namespace rrfp::python {

class AgreementHandle {
 public:
  explicit AgreementHandle(std::unique_ptr<AgreementSegment> segment)
      : segment_(std::move(segment)) {}

  int fd() const { return get().fd(); }
  void sign(std::int32_t member, std::uint64_t token) { get().sign(member, token); }
  bool is_signed(std::int32_t member, std::uint64_t token) const {
    return get().is_signed(member, token);
  }
  void join(std::int32_t member, std::vector<std::string> names,
            const std::vector<std::int32_t>& pids) {
    get().join(member, std::move(names), pids);
  }
  std::unique_ptr<AgreementSegment> take() {
    get();
    return std::move(segment_);
  }

 private:
  AgreementSegment& get() const {
    RRFP_CHECK(segment_ != nullptr, "this memory is in use by a pipeline already.");
    return *segment_;
  }

  std::unique_ptr<AgreementSegment> segment_;
};

}  // namespace rrfp::python
