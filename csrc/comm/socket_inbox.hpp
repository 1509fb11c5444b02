// SocketInbox: the stream of one peer, cut into messages.
//
// Header and metadata are read into a staging buffer, with whatever comes after them; payload
// goes straight into the buffer that the sink gave, but for the part that was staged already.
// While the sink has not given one, this peer's stream is not read any further; others are.
// Threads  the progress thread only; answer(): any.
// Bound    the staging buffer holds 64 KiB, or the largest header and metadata so far.
// Edges    I1  answer()'s CAS (release) pairs with the taker's exchange (acquire): the progress
//              thread sees the buffer's header and metadata written by whoever gave it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/header_check.hpp"
#include "comm/transport.hpp"

namespace rrfp {

class SocketInbox {
 public:
  SocketInbox(std::int32_t peer, std::uint64_t run);
  ~SocketInbox() { close(); }
  SocketInbox(const SocketInbox&) = delete;
  SocketInbox& operator=(const SocketInbox&) = delete;

  enum class Outcome : std::uint8_t {
    kDrained,    // the socket has no more now
    kMore,       // the budget is used up
    kPaused,     // waits for answer()
    kEnded,      // end of file
    kBroken,     // the socket gave an error (errno)
    kMalformed,  // defect() says what
  };
  struct Read {
    Outcome outcome = Outcome::kDrained;
    std::size_t num_events = 0;
  };
  // Reads about budget_bytes at most and delivers what is complete.
  Read read(int fd, std::size_t budget_bytes, MessageSink& sink);

  // The sink's buffer for the message that waits; released at once when none does any more.
  void answer(RecvTicket ticket, InboundMessage* buffer);
  // Whether read() can go on without a word from the socket: the answer has come.
  bool is_answered() const;
  bool is_paused() const { return phase_ == Phase::kPaused; }

  const std::string& defect() const { return defect_; }
  bool bye_received() const { return bye_received_; }
  // Where the stream stands, for people: "after 12 of 64 header bytes".
  std::string position() const;

  // From here on everything is read and thrown away.
  void discard();
  // Gives an unfinished buffer back. Nothing is read any more.
  void close();

 private:
  enum class Phase : std::uint8_t { kHeader, kPaused, kPayload, kDiscard };

  std::size_t staged_bytes() const { return staged_end_ - staged_begin_; }
  bool parse_header(MessageSink& sink, Read* result);
  void take_answer();
  bool fill_payload(MessageSink& sink);
  ssize_t receive(int fd, std::size_t budget_bytes);
  void make_room(std::size_t bytes);

  const std::int32_t peer_;
  ExpectedHeader expected_;
  Phase phase_ = Phase::kHeader;
  MessageHeader header_;
  bool header_checked_ = false;
  bool bye_received_ = false;
  std::string defect_;

  std::vector<std::byte> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;

  InboundMessage* buffer_ = nullptr;   // being filled
  std::uint64_t filled_bytes_ = 0;

  // Null: no message waits for a buffer. kWanted: one does. Else: its buffer.
  static InboundMessage kWanted;
  std::atomic<InboundMessage*> answer_{nullptr};
  std::atomic<std::uint64_t> ticket_id_{0};
};

}  // namespace rrfp
