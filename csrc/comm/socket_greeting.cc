#include "comm/socket_greeting.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace rrfp {

namespace {

bool send_greeting(int fd, MessageHeader header, const RunToken& token, const std::string& text) {
  header.metadata_bytes = static_cast<std::uint32_t>(token.size() + text.size());
  iovec pieces[] = {{&header, sizeof header},
                    {const_cast<std::byte*>(token.data()), token.size()},
                    {const_cast<char*>(text.data()), text.size()}};
  msghdr request{};
  request.msg_iov = pieces;
  request.msg_iovlen = 3;
  const auto whole = static_cast<ssize_t>(sizeof header + header.metadata_bytes);
  return ::sendmsg(fd, &request, MSG_NOSIGNAL | MSG_DONTWAIT) == whole;
}

// Takes the same time wherever the difference is.
bool same_token(const std::byte* bytes, const RunToken& token) {
  std::byte difference{0};
  for (std::size_t i = 0; i < token.size(); ++i) difference |= bytes[i] ^ token[i];
  return difference == std::byte{0};
}

}  // namespace

bool send_hello(int fd, std::int32_t rank, std::uint64_t run, const RunToken& token) {
  MessageHeader header;
  header.type = MessageType::kHello;
  header.run = run;
  header.source_rank = rank;
  return send_greeting(fd, header, token, {});
}

bool send_refusal(int fd, std::int32_t rank, std::uint64_t run, const RunToken& token,
                  const std::string& text) {
  MessageHeader header;
  header.type = MessageType::kAbort;
  header.run = run;
  header.source_rank = rank;
  return send_greeting(fd, header, token, text.substr(0, kMaxRefusalTextBytes));
}

GreetingReader::Outcome GreetingReader::read(int fd, const RunToken& token) {
  for (;;) {
    std::size_t wanted = sizeof header_;
    if (num_bytes_ >= sizeof header_) {
      std::memcpy(&header_, bytes_.data(), sizeof header_);
      const bool refusal = header_.type == MessageType::kAbort;
      const std::size_t most = sizeof(RunToken) + (refusal ? kMaxRefusalTextBytes : 0);
      if (header_.magic != kMessageMagic ||
          (!refusal && header_.type != MessageType::kHello) ||
          header_.metadata_bytes < sizeof(RunToken) || header_.metadata_bytes > most) {
        seen_ = "it sent something other than a greeting of rrfp";
        return Outcome::kStranger;
      }
      wanted += header_.metadata_bytes;
      if (num_bytes_ == wanted) return judge(token);
    }
    const ssize_t received = ::recv(fd, bytes_.data() + num_bytes_, wanted - num_bytes_, 0);
    if (received > 0) {
      num_bytes_ += static_cast<std::size_t>(received);
    } else if (received == 0) {
      seen_ = "it closed the connection after " + std::to_string(num_bytes_) +
              " bytes of its greeting";
      return Outcome::kGone;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return Outcome::kIncomplete;
    } else if (errno != EINTR) {
      seen_ = std::string("its connection gave \"") + std::strerror(errno) + "\"";
      return Outcome::kGone;
    }
  }
}

GreetingReader::Outcome GreetingReader::judge(const RunToken& token) {
  if (!same_token(bytes_.data() + sizeof header_, token)) {
    seen_ = "it sent the token of another run";
    return Outcome::kStranger;
  }
  return header_.type == MessageType::kHello ? Outcome::kHello : Outcome::kRefusal;
}

std::string GreetingReader::text() const {
  return {reinterpret_cast<const char*>(bytes_.data()) + kHelloBytes,
          reinterpret_cast<const char*>(bytes_.data()) + num_bytes_};
}

}  // namespace rrfp
