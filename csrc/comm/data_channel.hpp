// DataChannel: how the bytes of a device message get from one rank's memory into another's.
// DeviceTransport says when; IpcChannel and NcclChannel say how.
//
// Life of a message (everything on the progress thread; bodies travel as control messages)
//   sender    kAnnounce      the header, when the producing task was launched
//   receiver  open_recv()    a slot of the receiver's memory is ready       -> kGrant
//   sender    start_send()   granted, and either the sender has *seen* the payload computed or
//                            the channel follows streams
//   receiver  start_recv()   NCCL only, at the sender's kGo
//   both      the WordPoint each call gave is reached: arrived; the segments may be reused
//   receiver  close_recv()   after it arrived
// A channel that follows streams (IPC) may be handed a send before its payload is computed, and
// gives points that a receiver's stream can wait for. Others (NCCL) have nothing enqueued behind
// unfinished work: their kernels would hold up other streams, or be held up by them.
//
// Stopping  After stop(peer) no word may be believed; has_settled() says when the peer and this
//           rank have stopped touching each other's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.hpp"
#include "comm/message.hpp"
#include "device/receive_memory.hpp"
#include "device/stream_word.hpp"

namespace rrfp {

inline bool is_device_data(const MessageHeader& header) {
  return header.type == MessageType::kData && header.place == MemoryPlace::kDevice;
}

struct AnnounceBody {
  std::uint32_t id = 0;        // of the message, on its edge
  std::uint32_t reserved = 0;
  MessageHeader header;        // kData, kDevice; the metadata follows
};

struct GrantBody {
  std::uint32_t id = 0;
  // IPC: which slot of which slab, and the word to write when the copy is done.
  std::uint32_t slab_index = 0;
  std::uint64_t slab_offset = 0;
  std::uint32_t word_index = 0;
  std::uint32_t word_value = 0;
  std::uint64_t slab_address = 0;       // in the receiver's process
  std::byte slab_handle[64] = {};       // cudaIpcMemHandle_t
};

struct GoBody {
  std::uint32_t id = 0;
  std::uint32_t sequence = 0;  // of the edge, from 0
  std::uint64_t num_segments = 0;  // their sizes follow, 8 bytes each
};

class DataChannel {
 public:
  virtual ~DataChannel() = default;

  virtual const char* name() const = 0;
  virtual bool needs_go() const = 0;
  virtual bool follows_streams(std::int32_t) const { return false; }

  // Receiver. False: no room now, ask again.
  virtual bool open_recv(std::int32_t peer, const ReceiveSlot& slot, GrantBody* grant,
                         WordPoint* arrived) = 0;
  virtual bool can_start_recv(std::int32_t peer) = 0;
  virtual std::string start_recv(std::int32_t peer, std::span<const std::uint64_t> segment_bytes,
                                 std::byte* target, WordPoint* arrived) = 0;
  virtual void close_recv(std::int32_t peer, const WordPoint& arrived) = 0;

  // Sender. The strings say why it could not, or are empty. The message has been computed, or
  // the channel follows streams.
  virtual bool can_start_send(std::int32_t peer) = 0;
  virtual std::string start_send(std::int32_t peer, const OutboundMessage& message,
                                 const GrantBody& grant, WordPoint* sent) = 0;

  // Asks the device whether it still works; not more often than every few milliseconds.
  virtual std::string check_device() = 0;

  // No more traffic with this peer, whose process may be dead; more than once is fine.
  virtual void stop(std::int32_t peer) = 0;
  // After stop(). Sender: the segments of a send that gave `point` may be reused.
  virtual bool has_settled_send(std::int32_t peer, const WordPoint& point) = 0;
  // After stop(), when all sends to the peer have settled: gives up the peer's memory.
  virtual void let_go(std::int32_t peer) = 0;
  // After stop(). Receiver: nobody writes any more to slots that were granted to the peer.
  virtual bool has_settled_recv(std::int32_t peer) = 0;
};

}  // namespace rrfp
