// SocketOutbox: what waits to be written to one peer, and how far the message on top of it is.
//
// kAbort, kControl, kStarted and kHeartbeat go before data messages that have not begun, in their
// own order; kBye goes last.
// Threads  the progress thread only. Allocates nothing. Does not own the messages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/transport.hpp"

struct iovec;

namespace rrfp {

class SocketOutbox {
 public:
  SocketOutbox(std::int32_t self_rank, std::uint64_t run) : self_rank_(self_rank), run_(run) {}

  void add(OutboundMessage* message);
  bool empty() const { return current_ == nullptr && urgent_.empty() && ordered_.empty(); }

  enum class Outcome : std::uint8_t {
    kEmpty,    // everything is written
    kMore,     // the budget is used up
    kBlocked,  // the socket takes no more now
    kBroken,   // it will never again (errno says why)
  };
  struct Written {
    Outcome outcome = Outcome::kEmpty;
    std::size_t num_sent = 0;
    std::size_t bytes = 0;
  };
  // Writes about budget_bytes at most; on_sent() for what is complete.
  Written write(int fd, std::size_t budget_bytes, MessageSink& sink);

  // Ends messages that have not begun; with keep_farewells, all but kAbort and kBye.
  void drop_unstarted(MessageSink& sink, const Status& status, bool keep_farewells);
  // Ends all. What has begun stays half written: the connection is of no use afterwards.
  void drop_all(MessageSink& sink, const Status& status);

 private:
  // A FIFO of messages, linked by `next`.
  struct Line {
    OutboundMessage* first = nullptr;
    OutboundMessage* last = nullptr;
    bool empty() const { return first == nullptr; }
    void push(OutboundMessage* message);
    OutboundMessage* pop();
  };

  // A message is a row of pieces: 0 the header, 1 the metadata, then each segment (even) and
  // its padding (odd).
  Segment piece(std::size_t index) const;
  std::size_t num_pieces() const { return 2 + 2 * current_->segments.size(); }
  bool begin_next();
  std::size_t gather(iovec* pieces, std::size_t budget_bytes) const;
  bool advance(std::size_t bytes);

  const std::int32_t self_rank_;
  const std::uint64_t run_;
  Line urgent_;
  Line ordered_;
  OutboundMessage* current_ = nullptr;  // begun
  std::size_t piece_ = 0;               // of current_: the one to write next, and
  std::uint64_t piece_offset_ = 0;      // how much of it is written
  std::uint32_t sequence_ = 1;          // 0 was the hello
};

}  // namespace rrfp
