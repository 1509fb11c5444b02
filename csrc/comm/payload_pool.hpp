// PayloadPool: where received messages live. A message and its payload are taken together,
// used without a copy as tensors, and come back whenever the last tensor is dropped.
//
// Threads   any, for everything. Progress: acquire() and release() are lock-free while a free
//           buffer of about the wanted size is there; only a new buffer takes a mutex and the
//           allocator.
// Bound     reserved_bytes <= 2 * peak_live_bytes + kIdleFloorBytes: what is kept follows the
//           messages held at once, not those ever received. Buffers of other sizes are given
//           up before a new one would pass the bound. A buffer wastes at most a fifth of
//           itself, or, reused for a smaller message, half.
// Edges     P1  references_: release() (release) to the last one out (acquire), which frees.
//           SlotTable's T1 hands message and payload on.
// Lifetime  Messages may outlive the pool object: the memory goes when both the pool object
//           and the last message are gone.
// Cost      about 5 uncontended RMWs for acquire plus release.
// Checked by tests/cpp/transport/payload_pool_test.cc, tests/cpp/stress/payload_pool_stress.cc.
#pragma once

#include <cstdint>

#include "comm/message.hpp"

namespace rrfp {

class PayloadPool {
 public:
  static constexpr std::uint64_t kIdleFloorBytes = std::uint64_t{64} << 20;

  PayloadPool();
  ~PayloadPool();
  PayloadPool(const PayloadPool&) = delete;
  PayloadPool& operator=(const PayloadPool&) = delete;

  // A message with a payload buffer of at least payload_bytes (0: payload is null). Header,
  // attachment and next are as new; metadata is empty but keeps its capacity. Null when there
  // is no memory.
  InboundMessage* acquire(std::uint64_t payload_bytes) noexcept;

  // The same as message->release(message).
  static void release(InboundMessage* message) noexcept;

  struct Usage {
    std::uint64_t live_bytes = 0;       // payload buffers of messages not yet released
    std::uint64_t peak_live_bytes = 0;
    std::uint64_t reserved_bytes = 0;   // live and idle
    std::uint32_t num_messages = 0;     // message records, live and idle
  };
  Usage usage() const;

 private:
  struct State;
  State* state_;
};

}  // namespace rrfp
