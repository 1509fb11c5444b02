// The greeting: how both ends of a new connection show that they belong to one run.
//
// The caller sends a hello; the other end answers with its own, or with a refusal in words.
//   hello    a header of type kHello, and the run token as metadata
//   refusal  a header of type kAbort, and the run token and a text as metadata
// This layout is the same in all wire versions, so that two versions can tell each other.
// Whoever does not send the token is a stranger: it gets no answer, whatever else it says.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "comm/message.hpp"
#include "comm/socket_transport.hpp"

namespace rrfp {

inline constexpr std::size_t kHelloBytes = sizeof(MessageHeader) + sizeof(RunToken);
inline constexpr std::size_t kMaxRefusalTextBytes = 512;

// Both fit the buffer of a fresh socket: false means that the connection is gone.
bool send_hello(int fd, std::int32_t rank, std::uint64_t run, const RunToken& token);
bool send_refusal(int fd, std::int32_t rank, std::uint64_t run, const RunToken& token,
                  const std::string& text);

// Collects the greeting of the other end, byte by byte if need be, and not one byte more.
class GreetingReader {
 public:
  enum class Outcome : std::uint8_t {
    kIncomplete,
    kGone,       // closed or broken; seen() says how
    kStranger,   // no greeting of this run; seen() says why
    kHello,      // the token is right; header() is as sent, and only magic is checked
    kRefusal,    // the token is right; text() says why
  };
  Outcome read(int fd, const RunToken& token);

  const MessageHeader& header() const { return header_; }
  std::string text() const;
  const std::string& seen() const { return seen_; }

 private:
  Outcome judge(const RunToken& token);

  std::array<std::byte, kHelloBytes + kMaxRefusalTextBytes> bytes_{};
  std::size_t num_bytes_ = 0;
  MessageHeader header_;
  std::string seen_;
};

}  // namespace rrfp
