// What travels between ranks: a 64-byte header, bounded metadata, then the payload.
// Routing is by header alone; messages of different microbatches may overtake one another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/task.hpp"

namespace rrfp {

inline constexpr std::uint32_t kMessageMagic = 0x50465252;  // "RRFP"
inline constexpr std::uint16_t kWireVersion = 1;
inline constexpr std::uint32_t kMaxMetadataBytes = 1 << 20;
inline constexpr std::uint64_t kMaxPayloadBytes = std::uint64_t{1} << 40;

enum class MessageType : std::uint16_t {
  kHello = 1,      // first on a connection: token and rank
  kData = 2,       // an activation or a gradient
  kControl = 3,    // a blob between the Python sides (options of a step, ...)
  kHeartbeat = 4,  // "alive", with the sender's RankState as metadata
  kAbort = 5,      // a Status, as metadata: this step is over everywhere
  kBye = 6,        // an orderly end: end-of-file after this is no loss
};

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
  std::uint8_t reserved[7] = {0, 0, 0, 0, 0, 0, 0};
  std::uint32_t metadata_bytes = 0;
  std::uint32_t num_tensors = 0;
  std::uint64_t payload_bytes = 0;
};
static_assert(sizeof(MessageHeader) == 64);

// One contiguous piece of payload. Pieces follow one another on the wire, each padded to
// kPayloadAlignment, so that a receiver can hand out aligned tensors of one buffer.
inline constexpr std::size_t kPayloadAlignment = 64;
struct Segment {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

// A message on its way out. Belongs to whoever called post_send until on_sent() gives it back.
struct OutboundMessage {
  MessageHeader header;
  std::vector<std::byte> metadata;
  std::vector<Segment> segments;   // must stay valid and unchanged until on_sent()
  void* attachment = nullptr;      // moved to the receiver as it is, inside one process only
  void* owner = nullptr;           // the caller's own: what keeps the segments alive
  OutboundMessage* next = nullptr; // intrusive link of whoever holds the message
};

// A message that has come in. `payload` is one buffer from the receiver's pool.
struct InboundMessage {
  MessageHeader header;
  std::vector<std::byte> metadata;
  std::byte* payload = nullptr;    // payload_bytes long, kPayloadAlignment aligned, or null
  void* attachment = nullptr;
  InboundMessage* next = nullptr;
};

}  // namespace rrfp
