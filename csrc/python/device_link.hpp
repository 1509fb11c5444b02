// DeviceLink: how a rank with a GPU is joined to its peers, in steps that Python interleaves
// with the rendezvous: make a link, publish its address, open it with everybody's, and put it
// together with the control transport. device_link.cc does it; device_link_cpu.cc, of a build
// without CUDA, throws UserError and says why.
//
// Threads  One at a time. open() and make_device_ranks() block, without the GIL.
// Bound    open() and make_device_ranks() end at their time-outs.
// Errors   What CUDA answers is thrown as StatusError with kDeviceFailed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/transport.hpp"
#include "python/compute_stream.hpp"

namespace rrfp::python {

// A transport, and the stream whose work it carries.
struct DeviceRank {
  std::unique_ptr<ComputeStream> stream;  // first: it outlives the transport
  std::unique_ptr<Transport> transport;
};

class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  virtual const std::string& address() const = 0;
  // Empty, or why the peers cannot be reached this way; the link is of no more use then. All
  // ranks' control connections stand already.
  virtual std::string open(const std::vector<std::string>& addresses, std::int64_t timeout_ms,
                           const std::function<bool()>& interrupted) = 0;
  // Once, after open(). `held_up_ms`: see DeviceTransport.
  virtual DeviceRank join(std::unique_ptr<Transport> control, std::int64_t held_up_ms) = 0;
};

// `follows_streams`: messages are waited for by streams, see DeviceTransport.
std::unique_ptr<DeviceLink> make_ipc_link(std::int32_t rank, std::int32_t num_ranks, int device,
                                          bool follows_streams);

// `edges`: (source rank, target rank) of the whole group, the same on all ranks.
std::unique_ptr<DeviceLink> make_nccl_link(
    std::int32_t rank, const std::vector<std::pair<std::int32_t, std::int32_t>>& edges,
    int device);

// Ranks that are threads of this process, one for each entry of `devices`.
std::vector<DeviceRank> make_device_ranks(const std::vector<int>& devices, std::uint64_t run,
                                          std::int64_t timeout_ms,
                                          std::int64_t peer_timeout_ms);

}  // namespace rrfp::python
