#include "comm/socket_outbox.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.hpp"

namespace rrfp {

namespace {
constexpr std::size_t kMaxPieces = 64;  // of one system call
alignas(kPayloadAlignment) constexpr std::byte kPadding[kPayloadAlignment] = {};
}  // namespace

void SocketOutbox::Line::push(OutboundMessage* message) {
  message->next = nullptr;
  (first == nullptr ? first : last->next) = message;
  last = message;
}

OutboundMessage* SocketOutbox::Line::pop() {
  OutboundMessage* message = first;
  if (message != nullptr) first = std::exchange(message->next, nullptr);
  return message;
}

void SocketOutbox::add(OutboundMessage* message) {
  const MessageType type = message->header.type;
  const bool in_order = type == MessageType::kData || type == MessageType::kBye;
  (in_order ? ordered_ : urgent_).push(message);
}

// Makes the next message current and completes its header; false: there is none.
bool SocketOutbox::begin_next() {
  current_ = urgent_.empty() ? ordered_.pop() : urgent_.pop();
  if (current_ == nullptr) return false;
  MessageHeader& header = current_->header;
  header.magic = kMessageMagic;
  header.version = kWireVersion;
  header.run = run_;
  header.source_rank = self_rank_;
  header.sequence = sequence_++;
  header.metadata_bytes = static_cast<std::uint32_t>(current_->metadata.size());
  header.payload_bytes = total_payload_bytes(*current_);
  RRFP_INVARIANT(current_->metadata.size() <= kMaxMetadataBytes,
                 "a message has " + std::to_string(current_->metadata.size()) +
                     " bytes of metadata, at most " + std::to_string(kMaxMetadataBytes) +
                     " can be sent");
  piece_ = 0;
  piece_offset_ = 0;
  return true;
}

Segment SocketOutbox::piece(std::size_t index) const {
  if (index == 0) {
    return {reinterpret_cast<const std::byte*>(&current_->header), sizeof(MessageHeader)};
  }
  if (index == 1) return {current_->metadata.data(), current_->metadata.size()};
  const Segment& segment = current_->segments[index / 2 - 1];
  if (index % 2 == 0) return segment;
  return {kPadding, padded_bytes(segment.bytes) - segment.bytes};
}

// What is left of the current message, as far as one system call and the budget go.
std::size_t SocketOutbox::gather(iovec* pieces, std::size_t budget_bytes) const {
  std::size_t count = 0;
  std::uint64_t offset = piece_offset_;
  for (std::size_t i = piece_; i < num_pieces() && count < kMaxPieces && budget_bytes > 0; ++i) {
    const Segment whole = piece(i);
    const std::uint64_t bytes = std::min<std::uint64_t>(whole.bytes - offset, budget_bytes);
    if (bytes > 0) {
      pieces[count++] = {const_cast<std::byte*>(whole.data + offset), bytes};
      budget_bytes -= bytes;
    }
    offset = 0;
  }
  return count;
}

// Takes note of `bytes` written; true when the current message is complete.
bool SocketOutbox::advance(std::size_t bytes) {
  while (piece_ < num_pieces()) {
    const std::uint64_t left = piece(piece_).bytes - piece_offset_;
    if (bytes < left) {
      piece_offset_ += bytes;
      return false;
    }
    bytes -= left;
    ++piece_;
    piece_offset_ = 0;
  }
  return true;
}

SocketOutbox::Written SocketOutbox::write(int fd, std::size_t budget_bytes, MessageSink& sink) {
  Written result;
  while (current_ != nullptr || begin_next()) {
    if (result.bytes >= budget_bytes) {
      result.outcome = Outcome::kMore;
      return result;
    }
    iovec pieces[kMaxPieces];
    msghdr request{};
    request.msg_iov = pieces;
    request.msg_iovlen = gather(pieces, budget_bytes - result.bytes);
    const ssize_t written = ::sendmsg(fd, &request, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0) {
      if (errno == EINTR) continue;
      const bool full = errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS;
      result.outcome = full ? Outcome::kBlocked : Outcome::kBroken;
      return result;
    }
    result.bytes += static_cast<std::size_t>(written);
    if (advance(static_cast<std::size_t>(written))) {
      ++result.num_sent;
      sink.on_sent(std::exchange(current_, nullptr), Status{});
    }
  }
  return result;
}

void SocketOutbox::drop_unstarted(MessageSink& sink, const Status& status, bool keep_farewells) {
  for (Line* line : {&urgent_, &ordered_}) {
    Line dropped = std::exchange(*line, Line{});
    while (OutboundMessage* message = dropped.pop()) {
      const MessageType type = message->header.type;
      const bool farewell = type == MessageType::kAbort || type == MessageType::kBye;
      if (farewell && keep_farewells) {
        line->push(message);
      } else {
        sink.on_sent(message, status);
      }
    }
  }
}

void SocketOutbox::drop_all(MessageSink& sink, const Status& status) {
  if (current_ != nullptr) sink.on_sent(std::exchange(current_, nullptr), status);
  drop_unstarted(sink, status, false);
}

}  // namespace rrfp
