// IpcChannel: payload between devices of one host, by CUDA IPC and copy engines.
//
// Each rank makes an IpcEndpoint and publishes its address; open_ipc_channel() then joins this
// rank to all others. The receiver's slabs are mapped by the senders; a sender copies straight
// into the slot it was granted and lets its stream write the word that was granted with it,
// which both sides poll. Copy engines need no SM, so a message does not wait for the GEMM that
// is running, and takes little from it. Ranks of one process are joined without IPC (CUDA does
// not open a handle in the process that made it): the slab's own address is used.
//
// Words    A grant names a word of the sender's page and the number that will be written to it.
//          Numbers of one edge only grow, and a word is granted again only after its last
//          number was seen, so it never has to be cleared.
// Threads  The progress thread, except construction and destruction.
// Bound    kIpcWords grants for each edge; further messages wait for one.
// Cost     start_send(): 2-3 us for each segment and 1 us for the word. The first message into
//          a new slab of a peer: about 2 ms, for mapping it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/data_channel.hpp"
#include "comm/ipc_segment.hpp"

namespace rrfp {

class IpcEndpoint {
 public:
  // Throws DeviceError or std::system_error.
  IpcEndpoint(std::int32_t rank, std::int32_t num_ranks, int device, std::uint64_t slab_bytes);

  // Text to be published: host, process, segment, device, first slab.
  const std::string& address() const { return address_; }
  const std::shared_ptr<ReceiveMemory>& memory() const { return memory_; }
  std::int32_t rank() const { return rank_; }
  int device() const { return memory_->device(); }
  const IpcSegment& segment() const { return segment_; }

 private:
  std::int32_t rank_;
  std::shared_ptr<ReceiveMemory> memory_;
  IpcSegment segment_;
  std::string address_;
};

// Maps the first slab and the page of every other rank, which must still hold their endpoints.
// Null, and `refusal` set in words, when one cannot be reached this way: other hosts,
// containers, devices without peer access. Then NCCL is the channel for all. `follows_streams`:
// see DataChannel; ranks of one process never do, because they share what a stream could hold up.
std::unique_ptr<DataChannel> open_ipc_channel(std::unique_ptr<IpcEndpoint> endpoint,
                                              const std::vector<std::string>& addresses,
                                              bool follows_streams, std::string* refusal);

}  // namespace rrfp
