// What travels between ranks: a 64-byte header, bounded metadata, then the payload.
// Routing is by header alone; messages of different microbatches may overtake one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/task.hpp"
#include "base/trace.hpp"
#include "device/stream_word.hpp"

namespace rrfp {

inline constexpr std::uint32_t kMessageMagic = 0x50465252;  // "RRFP"
inline constexpr std::uint16_t kWireVersion = 2;
inline constexpr std::uint32_t kMaxMetadataBytes = 1 << 20;
inline constexpr std::uint64_t kMaxPayloadBytes = std::uint64_t{1} << 40;
inline constexpr std::uint32_t kMaxTensors = UINT16_MAX;

enum class MessageType : std::uint16_t {
  kHello = 1,      // first on a connection: token and rank
  kData = 2,       // an activation or a gradient
  kControl = 3,    // a blob between the Python sides (options of a step, ...)
  kHeartbeat = 4,  // "alive", with the sender's RankState as metadata
  kAbort = 5,      // a Status, as metadata: this step is over everywhere
  kBye = 6,        // an orderly end: end-of-file after this is no loss
  // Of DeviceTransport, to its twin: small and complete, delivered by on_control().
  kAnnounce = 7,   // a kData header whose payload will come on the data channel
  kGrant = 8,      // the receiver's memory is ready for it
  kGo = 9,         // NCCL: the sender starts now, so may the receiver
  // Of the runtime, a header alone: the task whose output these fields name has begun.
  kStarted = 10,
};

// Where a payload lies. kDevice: device memory, moved by a data channel (device_transport.hpp).
enum class MemoryPlace : std::uint8_t { kHost = 0, kDevice = 1 };

// Little-endian on the wire, exactly as here.
struct MessageHeader {
  std::uint32_t magic = kMessageMagic;
  std::uint16_t version = kWireVersion;
  MessageType type = MessageType::kData;
  std::uint64_t run = 0;            // which pipeline: drawn with the run token
  std::uint32_t step = 0;
  std::uint32_t sequence = 0;       // per connection and direction, from 0
  std::int32_t source_rank = -1;    // checked against the connection it came on
  std::int32_t source_stage = -1;   // kData: whose output (F) or input gradient (B) this is
  std::int32_t target_stage = -1;
  std::int32_t microbatch = -1;
  TaskKind kind = TaskKind::kForward;  // kind of the *target* task's pass: F or B
  MemoryPlace place = MemoryPlace::kHost;  // a socket carries kHost payloads only
  std::uint16_t num_tensors = 0;
  std::uint32_t duration_us = 0;    // kStarted: what the task usually takes; kData: what it took,
                                    // 0: nothing to learn from; kBye of a DeviceTransport: no
                                    // time, but how many announcements it must not overtake
  std::uint32_t metadata_bytes = 0;
  std::uint32_t computed_us = 0;    // kData, kGo: when the payload was, to_short_us() of the
                                    // sender's clock; 0: not known
  std::uint64_t payload_bytes = 0;  // of all segments, each padded; a multiple of the alignment
};
static_assert(sizeof(MessageHeader) == 64);

// One contiguous piece of payload. Pieces follow one another on the wire, each padded to
// kPayloadAlignment, so that a receiver can hand out aligned tensors of one buffer.
inline constexpr std::size_t kPayloadAlignment = 64;
struct Segment {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

constexpr std::uint64_t padded_bytes(std::uint64_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

// A message on its way out. Belongs to the transport from post_send() until on_sent() gives it
// back. The caller fills type, step, the stages, microbatch, kind and num_tensors of the header;
// the transport fills the rest.
struct OutboundMessage {
  MessageHeader header;
  std::vector<std::byte> metadata;
  std::vector<Segment> segments;   // must stay valid and unchanged until on_sent()
  void* attachment = nullptr;      // moved to the receiver (null then), inside one process only
  void* owner = nullptr;           // the caller's own: what keeps the segments alive
  WordPoint computed;              // kDevice: when the segments are; StreamTimeline::record
  TraceSpan span = 0;              // the runtime's: of the message in a profile
  OutboundMessage* next = nullptr; // intrusive link of whoever holds the message
  std::int32_t peer = -1;          // where to; set by post_send()
};

// What header.payload_bytes must say.
inline std::uint64_t total_payload_bytes(const OutboundMessage& message) {
  std::uint64_t bytes = 0;
  for (const Segment& segment : message.segments) bytes += padded_bytes(segment.bytes);
  return bytes;
}

// The payload as a receiver finds it, padding zeroed; `to` holds total_payload_bytes().
inline void copy_segments(const OutboundMessage& message, std::byte* to) {
  for (const Segment& segment : message.segments) {
    const std::uint64_t padded = padded_bytes(segment.bytes);
    if (segment.bytes > 0) std::memcpy(to, segment.data, segment.bytes);
    if (padded > segment.bytes) std::memset(to + segment.bytes, 0, padded - segment.bytes);
    to += padded;
  }
}

// A message that has come in. `payload` is one buffer from the receiver's pool.
struct InboundMessage {
  MessageHeader header;
  std::vector<std::byte> metadata;
  std::byte* payload = nullptr;    // payload_bytes long, kPayloadAlignment aligned, or null
  void* attachment = nullptr;
  // kDevice: the transport gives the payload from its own memory (post_recv is called without
  // one), sets these, and puts its own release() before the pool's: a holder calls release() as
  // ever, once everything that reads the payload is enqueued on the reader's stream.
  void* payload_owner = nullptr;
  void (*pool_release)(InboundMessage*) = nullptr;  // what release() was before
  std::int32_t device_index = -1;  // CUDA device of the payload; -1: host
  WordPoint arrived;               // when the payload is there; none: it is there already
  InboundMessage* next = nullptr;
  // Takes the message back to the pool it came from, with a host payload; any thread. The
  // transport calls it for a message that was given to post_recv() and will not arrive.
  void (*release)(InboundMessage*) = nullptr;
};

}  // namespace rrfp
