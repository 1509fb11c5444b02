#include "comm/header_check.hpp"

#include <cstdio>

namespace rrfp {

namespace {

std::string in_hex(std::uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string differs(const char* field, const std::string& expected, const std::string& got) {
  return std::string(field) + " is " + got + ", expected " + expected;
}

std::string exceeds(const char* field, std::uint64_t limit, std::uint64_t got) {
  return std::string(field) + " is " + std::to_string(got) + ", above the limit of " +
         std::to_string(limit);
}

// What holds between the fields, whoever sent them.
std::string shape_defect(const MessageHeader& header) {
  const auto type = static_cast<std::uint16_t>(header.type);
  if (type <= static_cast<std::uint16_t>(MessageType::kHello) ||
      type > static_cast<std::uint16_t>(MessageType::kStarted)) {
    return "message type is " + std::to_string(type) + ", which this connection does not carry";
  }
  if (static_cast<int>(header.kind) >= kNumTaskKinds) {
    return exceeds("task kind", kNumTaskKinds - 1, static_cast<std::uint64_t>(header.kind));
  }
  if (header.metadata_bytes > kMaxMetadataBytes) {
    return exceeds("metadata_bytes", kMaxMetadataBytes, header.metadata_bytes);
  }
  if (header.payload_bytes > kMaxPayloadBytes) {
    return exceeds("payload_bytes", kMaxPayloadBytes, header.payload_bytes);
  }
  if (header.payload_bytes % kPayloadAlignment != 0) {
    return "payload_bytes is " + std::to_string(header.payload_bytes) + ", not a multiple of " +
           std::to_string(kPayloadAlignment);
  }
  if (header.type != MessageType::kData && header.payload_bytes != 0) {
    return "a message of type " + std::to_string(type) + " has a payload of " +
           std::to_string(header.payload_bytes) + " bytes, expected none";
  }
  if (header.type == MessageType::kData && header.place != MemoryPlace::kHost) {
    return "the payload lies in device memory, expected host memory";
  }
  return {};
}

}  // namespace

std::string header_defect(const MessageHeader& header, const ExpectedHeader& expected) {
  if (header.magic != kMessageMagic) {
    return differs("magic", in_hex(kMessageMagic), in_hex(header.magic));
  }
  if (header.version != kWireVersion) {
    return differs("wire version", std::to_string(kWireVersion), std::to_string(header.version));
  }
  if (header.run != expected.run) {
    return differs("run", in_hex(expected.run), in_hex(header.run));
  }
  if (header.source_rank != expected.source_rank) {
    return differs("source rank", std::to_string(expected.source_rank),
                   std::to_string(header.source_rank));
  }
  if (header.sequence != expected.sequence) {
    return differs("sequence", std::to_string(expected.sequence),
                   std::to_string(header.sequence));
  }
  return shape_defect(header);
}

}  // namespace rrfp
