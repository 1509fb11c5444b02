// NcclChannel: payload between devices through NCCL: between hosts, and where devices of one
// host cannot reach each other's memory.
//
// One communicator for each directed edge, with its own stream. All edges are initialised and
// carry a first message at set-up, in one global order, because a first message may wait in
// the host call for the peer. Afterwards at most one operation is outstanding on an edge, and
// none is enqueued before its payload was seen computed: what is queued behind unfinished work
// occupies a hardware connection of the device, and with none left every stream stands still.
//
// An NCCL message is a kernel: beside a GEMM that fills the device it waits for that GEMM's
// end, on both sides (measured 300 to 500 us beside GEMMs of 850 us, for 4 bytes).
//
// Stopping  NCCL does not notice a dead peer. stop() aborts the edges with it on a thread of
//           their own (half a second each); what an aborted operation wrote is not believed.
// Threads   The progress thread, except construction and destruction.
// Bound     open_nccl_channel() ends at its time-out. A thread that is stuck inside NCCL then is
//           left behind, since a communicator that is being initialised cannot be aborted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/data_channel.hpp"

namespace rrfp {

// Payload goes from `source` to `target`.
struct NcclEdge {
  std::int32_t source = -1;
  std::int32_t target = -1;
  friend auto operator<=>(const NcclEdge&, const NcclEdge&) = default;
};

class NcclEndpoint {
 public:
  // `edges`: of the whole group, the same on all ranks. Throws UserError when NCCL cannot be
  // used here, in words.
  NcclEndpoint(std::int32_t rank, std::vector<NcclEdge> edges, int device);

  // Text to be published: an identifier for each edge that this rank is the source of.
  const std::string& address() const { return address_; }
  std::int32_t rank() const { return rank_; }
  int device() const { return device_; }
  const std::vector<NcclEdge>& edges() const { return edges_; }  // in the global order

 private:
  std::int32_t rank_;
  int device_;
  std::vector<NcclEdge> edges_;
  std::string address_;
};

struct NcclSetup {
  std::vector<std::string> addresses;  // by rank
  std::int64_t timeout_ms = 60000;
  std::function<bool()> interrupted;   // asked several times a second; true ends the set-up
};

// Call it when all ranks are known to be there (their control connections stand). Null, and
// `refusal` set, when an edge did not come up in time.
std::unique_ptr<DataChannel> open_nccl_channel(const NcclEndpoint& endpoint,
                                               const NcclSetup& setup, std::string* refusal);

}  // namespace rrfp
