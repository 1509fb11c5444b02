#include "comm/socket_inbox.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.hpp"

namespace rrfp {

namespace {
constexpr std::size_t kStagingBytes = 64 << 10;

void give_back(InboundMessage* buffer) {
  if (buffer != nullptr && buffer->release != nullptr) buffer->release(buffer);
}
}  // namespace

InboundMessage SocketInbox::kWanted;

SocketInbox::SocketInbox(std::int32_t peer, std::uint64_t run)
    : peer_(peer), expected_{run, peer, 1}, staging_(kStagingBytes) {}

SocketInbox::Read SocketInbox::read(int fd, std::size_t budget_bytes, MessageSink& sink) {
  Read result;
  std::size_t received_bytes = 0;
  for (;;) {
    while (phase_ == Phase::kHeader && parse_header(sink, &result)) {
    }
    if (!defect_.empty()) {
      result.outcome = Outcome::kMalformed;
      return result;
    }
    if (phase_ == Phase::kPaused) take_answer();
    if (phase_ == Phase::kPaused) {
      result.outcome = Outcome::kPaused;
      return result;
    }
    if (phase_ == Phase::kPayload && fill_payload(sink)) {
      ++result.num_events;
      continue;
    }
    if (received_bytes >= budget_bytes) {
      result.outcome = Outcome::kMore;
      return result;
    }
    const ssize_t received = receive(fd, budget_bytes);
    if (received > 0) {
      received_bytes += static_cast<std::size_t>(received);
      ++result.num_events;
    } else if (received == 0) {
      result.outcome = Outcome::kEnded;
      return result;
    } else if (errno != EINTR) {
      const bool empty = errno == EAGAIN || errno == EWOULDBLOCK;
      result.outcome = empty ? Outcome::kDrained : Outcome::kBroken;
      return result;
    }
  }
}

// Handles one message as far as its metadata; false when more bytes are needed, or on a defect.
bool SocketInbox::parse_header(MessageSink& sink, Read* result) {
  if (staged_bytes() < sizeof(MessageHeader)) return false;
  if (!header_checked_) {
    std::memcpy(&header_, staging_.data() + staged_begin_, sizeof header_);
    defect_ = header_defect(header_, expected_);
    if (!defect_.empty()) return false;
    header_checked_ = true;
  }
  const std::size_t whole_bytes = sizeof(MessageHeader) + header_.metadata_bytes;
  if (staged_bytes() < whole_bytes) {
    make_room(whole_bytes);
    return false;
  }
  const std::span metadata(staging_.data() + staged_begin_ + sizeof(MessageHeader),
                           header_.metadata_bytes);
  staged_begin_ += whole_bytes;  // the bytes stay where they are until the next receive()
  header_checked_ = false;
  ++expected_.sequence;
  ++result->num_events;
  if (header_.type != MessageType::kData) {
    if (header_.type == MessageType::kBye) bye_received_ = true;
    sink.on_control(peer_, header_, metadata);
    return phase_ == Phase::kHeader;
  }
  phase_ = Phase::kPaused;
  // relaxed: read in answer(), which the sink calls with the ticket made here.
  const std::uint64_t id = ticket_id_.load(std::memory_order_relaxed) + 1;
  ticket_id_.store(id, std::memory_order_relaxed);
  answer_.store(&kWanted, std::memory_order_release);  // I1: answer() finds it
  sink.on_header(RecvTicket{peer_, id}, header_, metadata);
  return false;
}

void SocketInbox::answer(RecvTicket ticket, InboundMessage* buffer) {
  RRFP_INVARIANT(ticket.id == ticket_id_.load(std::memory_order_relaxed),  // as in parse_header()
                 "post_recv() names a message of rank " + std::to_string(peer_) +
                     " that was answered before");
  InboundMessage* expected = &kWanted;
  if (!answer_.compare_exchange_strong(expected, buffer, std::memory_order_acq_rel)) {  // I1
    give_back(buffer);
  }
}

bool SocketInbox::is_answered() const {
  const InboundMessage* answer = answer_.load(std::memory_order_acquire);  // I1
  return phase_ == Phase::kPaused && answer != &kWanted;
}

void SocketInbox::take_answer() {
  if (!is_answered()) return;
  buffer_ = answer_.exchange(nullptr, std::memory_order_acquire);  // I1
  filled_bytes_ = 0;
  phase_ = Phase::kPayload;
}

// Moves staged payload over; true when the message was complete, and is delivered.
bool SocketInbox::fill_payload(MessageSink& sink) {
  const std::size_t staged = static_cast<std::size_t>(
      std::min<std::uint64_t>(staged_bytes(), header_.payload_bytes - filled_bytes_));
  if (staged > 0) {
    std::memcpy(buffer_->payload + filled_bytes_, staging_.data() + staged_begin_, staged);
    staged_begin_ += staged;
    filled_bytes_ += staged;
  }
  if (filled_bytes_ < header_.payload_bytes) return false;
  phase_ = Phase::kHeader;
  sink.on_message(peer_, std::exchange(buffer_, nullptr));
  return true;
}

// One system call: the payload's rest, if any, then the staging buffer.
ssize_t SocketInbox::receive(int fd, std::size_t budget_bytes) {
  if (phase_ == Phase::kDiscard) staged_begin_ = staged_end_;
  if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
  if (staged_end_ == staging_.size()) make_room(staged_bytes() + 1);
  iovec pieces[2];
  int count = 0;
  std::size_t rest_bytes = 0;
  if (phase_ == Phase::kPayload) {
    rest_bytes = static_cast<std::size_t>(std::min<std::uint64_t>(
        header_.payload_bytes - filled_bytes_, std::max<std::size_t>(budget_bytes, 1)));
    pieces[count++] = {buffer_->payload + filled_bytes_, rest_bytes};
  }
  if (phase_ != Phase::kPayload || filled_bytes_ + rest_bytes == header_.payload_bytes) {
    pieces[count++] = {staging_.data() + staged_end_, staging_.size() - staged_end_};
  }
  const ssize_t received = ::readv(fd, pieces, count);
  if (received > 0) {
    const auto bytes = static_cast<std::size_t>(received);
    const std::size_t payload_bytes = std::min(bytes, rest_bytes);
    filled_bytes_ += payload_bytes;
    staged_end_ += bytes - payload_bytes;
  }
  return received;
}

// Makes the staging buffer able to hold `bytes` from staged_begin_ on.
void SocketInbox::make_room(std::size_t bytes) {
  if (staging_.size() - staged_begin_ >= bytes) return;
  std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_bytes());
  staged_end_ -= staged_begin_;
  staged_begin_ = 0;
  if (staging_.size() < bytes) staging_.resize(bytes);
}

std::string SocketInbox::position() const {
  const auto part = [](std::uint64_t done, std::uint64_t whole, const char* what) {
    return "after " + std::to_string(done) + " of " + std::to_string(whole) + " " + what +
           " bytes of a message";
  };
  if (phase_ == Phase::kPayload) return part(filled_bytes_, header_.payload_bytes, "payload");
  if (phase_ == Phase::kPaused) return part(0, header_.payload_bytes, "payload");
  if (header_checked_) {
    return part(staged_bytes() - sizeof header_, header_.metadata_bytes, "metadata");
  }
  return staged_bytes() > 0 ? part(staged_bytes(), sizeof header_, "header") : "between messages";
}

void SocketInbox::discard() {
  close();
  phase_ = Phase::kDiscard;
}

void SocketInbox::close() {
  give_back(std::exchange(buffer_, nullptr));
  InboundMessage* answer = answer_.exchange(nullptr, std::memory_order_acq_rel);  // I1
  if (answer != &kWanted) give_back(answer);
}

}  // namespace rrfp
