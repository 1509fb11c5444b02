// Messages whose every word can be checked by whoever receives them: the metadata lists a seed
// and the size of each tensor, and the words follow from those.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "comm/message.hpp"

namespace rrfp::test {

// Where payloads lie; a transport for device memory brings its own.
struct PayloadPlace {
  MemoryPlace place = MemoryPlace::kHost;
  std::byte* (*allocate)(std::size_t bytes) =
      [](std::size_t bytes) { return new std::byte[bytes]; };
  void (*free)(std::byte* data) = [](std::byte* data) { delete[] data; };
  void (*write)(std::byte* to, const std::byte* from, std::size_t bytes) =
      [](std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); };
  void (*read)(std::byte* to, const std::byte* from, std::size_t bytes) =
      [](std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); };
};

class Random {  // splitmix64
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

 private:
  std::uint64_t state_;
};

inline std::vector<std::byte> tensor_content(std::uint64_t seed, std::size_t tensor,
                                             std::uint64_t bytes) {
  Random random(seed * 1000003 + tensor);
  std::vector<std::byte> content(bytes);
  for (std::uint64_t at = 0; at < bytes; at += 8) {
    const std::uint64_t word = random.next();
    std::memcpy(content.data() + at, &word, std::min<std::uint64_t>(8, bytes - at));
  }
  return content;
}

inline void append_word(std::vector<std::byte>* bytes, std::uint64_t word) {
  const std::size_t at = bytes->size();
  bytes->resize(at + sizeof word);
  std::memcpy(bytes->data() + at, &word, sizeof word);
}

inline std::uint64_t word_at(std::span<const std::byte> bytes, std::size_t index) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes.data() + index * sizeof word, sizeof word);
  return word;
}

// A data message that owns its tensors.
class TestMessage : public OutboundMessage {
 public:
  TestMessage(const PayloadPlace& place, std::uint64_t seed,
              const std::vector<std::uint64_t>& tensor_bytes)
      : place_(place) {
    header.place = place.place;
    header.step = 7;
    header.source_stage = 1;
    header.target_stage = 2;
    header.microbatch = static_cast<std::int32_t>(seed % 1000);
    header.num_tensors = static_cast<std::uint16_t>(tensor_bytes.size());
    append_word(&metadata, seed);
    for (std::size_t i = 0; i < tensor_bytes.size(); ++i) {
      append_word(&metadata, tensor_bytes[i]);
      Segment segment;
      if (tensor_bytes[i] > 0) {
        const auto content = tensor_content(seed, i, tensor_bytes[i]);
        std::byte* data = place_.allocate(content.size());
        place_.write(data, content.data(), content.size());
        segment = {data, content.size()};
      }
      segments.push_back(segment);
    }
  }
  ~TestMessage() {
    for (const Segment& segment : segments) {
      if (segment.data != nullptr) place_.free(const_cast<std::byte*>(segment.data));
    }
  }
  TestMessage(const TestMessage&) = delete;
  TestMessage& operator=(const TestMessage&) = delete;

  // After on_sent() the transport must not read the tensors again: make it visible if it does.
  void poison() {
    for (const Segment& segment : segments) {
      if (segment.data == nullptr) continue;
      const std::vector<std::byte> poison(segment.bytes, std::byte{0xdb});
      place_.write(const_cast<std::byte*>(segment.data), poison.data(), poison.size());
    }
  }

 private:
  PayloadPlace place_;
};

// Empty when the message is exactly what its metadata says, else the first difference.
inline std::string content_defect(const PayloadPlace& place, const InboundMessage& message) {
  const std::uint64_t seed = word_at(message.metadata, 0);
  const std::size_t num_tensors = message.metadata.size() / 8 - 1;
  if (message.header.num_tensors != num_tensors) return "wrong number of tensors";
  if (message.header.microbatch != static_cast<std::int32_t>(seed % 1000)) return "wrong header";
  std::vector<std::byte> payload(message.header.payload_bytes);
  if (!payload.empty()) {
    if (reinterpret_cast<std::uintptr_t>(message.payload) % kPayloadAlignment != 0) {
      return "payload is not aligned";
    }
    place.read(payload.data(), message.payload, payload.size());
  }
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < num_tensors; ++i) {
    auto expected = tensor_content(seed, i, word_at(message.metadata, i + 1));
    expected.resize(padded_bytes(expected.size()));  // padding travels as zeros
    const bool padded_alike = message.header.place == MemoryPlace::kHost;
    const std::uint64_t compared =
        padded_alike ? expected.size() : word_at(message.metadata, i + 1);
    if (at + expected.size() > payload.size()) return "payload is too short";
    if (compared > 0 && std::memcmp(payload.data() + at, expected.data(), compared) != 0) {
      return "tensor " + std::to_string(i) + " of message " + std::to_string(seed) + " differs";
    }
    at += expected.size();
  }
  return at == payload.size() ? "" : "payload is too long";
}

}  // namespace rrfp::test
