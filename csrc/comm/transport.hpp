// Transport: moves messages between this rank and its peers. One conformance suite
// (tests/cpp/transport/conformance.hpp) holds for every implementation.
//
// Life of a message
//   sender    post_send(peer, m)          any worker thread; does not block
//   receiver  sink.on_header(...)         header and metadata are complete and well-formed
//             post_recv(ticket, buffer)   the sink's answer, at once or later, from any thread
//             sink.on_message(...)        the payload is in the buffer
//   sender    sink.on_sent(m)             the segments may be reused; m is the caller's again
// Every posted message ends in on_sent(), also after abort(): then with the status not ok.
// Messages to one peer may complete in any order; nothing may rely on it.
//
// A buffer given to post_recv() ends in on_message(), or, after an abort or the loss of the
// peer, in its own release().
//
// Callbacks come from the thread that calls progress() (LocalTransport: from inside post_send(),
// post_recv() and abort()), and from the destructor. They do not block, throw, take the GIL, or
// call progress(). post_send() and post_recv() may be called from inside one. After the
// transport is destroyed its sink is never entered again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.hpp"
#include "comm/message.hpp"

namespace rrfp {

// Names one incoming message between on_header() and post_recv().
struct RecvTicket {
  std::int32_t peer = -1;
  std::uint64_t id = 0;
};

class MessageSink {
 public:
  virtual ~MessageSink() = default;
  virtual void on_header(RecvTicket ticket, const MessageHeader& header,
                         std::span<const std::byte> metadata) = 0;
  // `message` is what post_recv was given, filled; the sink owns it again. Of a device payload
  // message->arrived may say that it is still on its way.
  virtual void on_message(std::int32_t peer, InboundMessage* message) = 0;
  // Such a payload has arrived: look at the messages that were on their way.
  virtual void on_arrived() {}
  virtual void on_sent(OutboundMessage* message, const Status& status) = 0;
  // kControl, kAbort, kHeartbeat, kBye and kStarted: small, complete, no payload.
  virtual void on_control(std::int32_t peer, const MessageHeader& header,
                          std::span<const std::byte> body) = 0;
  // End-of-file without kBye, or a broken connection. At most once per peer.
  virtual void on_peer_lost(std::int32_t peer, const Status& status) = 0;
};

class Transport {
 public:
  static constexpr std::int64_t kAbortFlushMs = 1000;

  virtual ~Transport() = default;

  virtual const char* name() const = 0;
  virtual std::int32_t rank() const = 0;
  virtual std::int32_t num_ranks() const = 0;

  // Whether attachments reach the receiver (same process).
  virtual bool shares_address_space() const = 0;

  // Set once, before the first progress().
  virtual void set_sink(MessageSink* sink) = 0;

  virtual void post_send(std::int32_t peer, OutboundMessage* message) = 0;
  // The buffer must hold header.payload_bytes; its header and metadata are filled by the sink.
  // header.place kDevice: the buffer comes without a payload (see InboundMessage).
  virtual void post_recv(RecvTicket ticket, InboundMessage* buffer) = 0;

  // Bounded work without blocking; returns how many events it handled, 0 when idle. One thread
  // at a time. Only after a 0 may the caller sleep on wait_fd(), and at most kTickMs: an abort
  // has a deadline.
  virtual std::size_t progress(std::int64_t now_ns) = 0;

  // Any thread, more than once (the first counts): ends every posted operation with `status`.
  // kAbort and kBye messages posted before it are still sent, and a message of which a part is
  // on its way already is completed for their sake, for up to kAbortFlushMs; all other posts
  // end at the next progress(), later ones too. No other callback than on_sent() comes after.
  // The destructor aborts with kClosed, and so may wait kAbortFlushMs for a kAbort or kBye.
  virtual void abort(const Status& status) = 0;

  // Any thread. Whether a device payload was posted that the device has no orders to send yet.
  virtual bool owes_sends() const { return false; }
  // Any thread, after the run is known to be over: no stream waits for a message any more.
  virtual void release_streams() {}

  // A descriptor that poll() finds readable when progress() has something to do, or -1 when
  // the transport needs no progress thread.
  virtual int wait_fd() const = 0;
};

}  // namespace rrfp
