// Inbound: a received message in Python. Its tensors are DLPack capsules over the payload; the
// message goes back to its pool when the Inbound and the last of its tensors are gone.
//
// Threads  Methods: under the GIL. A capsule's deleter runs on any thread, without the GIL.
// Bound    One small allocation per tensor.
// Edges    L1  every release of a lease is acq_rel: whoever drops the last one has acquired
//              all that other holders did with the payload, before the pool reuses it.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <tuple>
#include <vector>

#include "comm/message.hpp"

namespace rrfp::python {

// Shared ownership of one inbound message.
class PayloadLease {
 public:
  explicit PayloadLease(InboundMessage* message) : message_(message) {}
  InboundMessage& message() { return *message_; }
  void share() { holders_.fetch_add(1, std::memory_order_relaxed); }  // a holder calls: L1 holds
  void release();

 private:
  InboundMessage* message_;
  std::atomic<std::int32_t> holders_{1};
};

// DLPack type code, bits per element, shape.
using TensorLayout = std::tuple<std::uint8_t, std::uint8_t, std::vector<std::int64_t>>;

class Inbound {
 public:
  explicit Inbound(InboundMessage* message) : lease_(new PayloadLease(message)) {}
  ~Inbound() { lease_->release(); }
  Inbound(const Inbound&) = delete;
  Inbound& operator=(const Inbound&) = delete;

  pybind11::bytes metadata() const;

  // One capsule per layout, in the order of the message's segments. UserError when they do not
  // add up to the payload.
  std::vector<pybind11::capsule> capsules(const std::vector<TensorLayout>& layouts) const;

 private:
  PayloadLease* lease_;
};

}  // namespace rrfp::python
