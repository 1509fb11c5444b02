// DeviceTransport: messages whose payload lies in device memory. Headers, grants, everything
// small and the question who is alive go over a control transport (sockets) that it owns; the
// payload goes over a data channel (IPC copy engines or NCCL).
//
// Sending   A kData message with header.place kDevice has its segments in device memory and is
//           posted when its task was *launched*: `computed` says when the payload exists
//           (StreamTimeline::record on the compute stream gives it). All other messages go
//           through the control transport unchanged.
// Receiving on_header() comes soon after the sender's post, long before the payload. The sink
//           answers with a buffer without payload. on_message() comes when the bytes are in
//           device memory: kernels launched from then on see them, no stream has to wait. Where
//           the channel follows streams it comes as soon as the payload has its place:
//           message->arrived says when the bytes are there, which a stream may wait for, and
//           on_arrived() comes then. message->release() may be called when everything that
//           reads the payload has been enqueued on the stream given to bind_reader().
// Streams   Where the channel follows streams a copy is enqueued behind the work that computes
//           its payload, in the order of the posts of all peers, so that nothing of this rank is
//           ever held up by what was launched later. Who launches behind a message first waits
//           until owes_sends() is false: then whatever the peers still need of this rank is in
//           the device's hands, and ranks cannot wait for one another in a circle, also where
//           streams share a hardware queue or a host call waits for the device.
// Failing   An error of CUDA or NCCL on this rank, also one that a stage's own kernel left
//           behind, is reported through on_peer_lost() of every peer, with kDeviceFailed.
//
// Threads   post_send(), post_recv(), abort(): any. bind_reader(), begin_task(), end_task(): the
//           worker. progress(): the progress thread, which also enters the control transport and
//           the channel.
// Progress  While a payload is awaited or on its way, progress() never returns 0, so that its
//           thread does not sleep: the device cannot ring a doorbell.
// Goodbye   A kBye goes straight to the control transport, where an abort lets it through, and may
//           be there before what was posted earlier has been announced. It says how many messages
//           that is: the receiver lets go of the peer when they have all come.
// Abort     The abort flag and the loss of a peer are looked at before any word is believed.
//           Streams that wait for a message are freed by release_streams() and abort(), and by the
//           loss of who sends it; the sink knows by then that what they go on with is worth
//           nothing. When progress() itself is held up for held_up_ms, a ProgressGuard reports
//           this rank lost and frees them.
// Bound     The destructor waits kSettleMs at most for copies under way and for the peers to
//           let go of this rank's memory; what is not settled by then is left to the process.
// Cost      Per message: one control message each way (two from the sender with NCCL), one
//           copy for each segment, one stream write.
// Edges     O1  num_owed_ falls with release when a send is in the device's hands, and
//               owes_sends() acquires: what the caller enqueues next comes after it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/push_list.hpp"
#include "comm/data_channel.hpp"
#include "comm/doorbell.hpp"
#include "comm/fork_guard.hpp"
#include "comm/outbound_queue.hpp"
#include "comm/progress_guard.hpp"
#include "comm/transport.hpp"

namespace rrfp {

class DeviceTransport final : public Transport, private MessageSink {
 public:
  static constexpr std::int64_t kSettleMs = 1000;
  static constexpr std::int64_t kCheckDeviceMs = 50;
  static constexpr int kPollsPerProgress = 16;
  // A send fails, too, because its receiver has just died: for so long the control transport may
  // say so before this device is blamed.
  static constexpr std::int64_t kPatienceMs = 200;
  static constexpr std::int64_t kHeldUpMs = 60000;
  // Peers to whom copies may be enqueued before they are computed: more streams that wait would
  // hold up copies of others.
  static constexpr int kMaxQueuedPeers = 3;

  DeviceTransport(std::unique_ptr<Transport> control, std::unique_ptr<DataChannel> channel,
                  std::shared_ptr<ReceiveMemory> memory, std::int64_t held_up_ms = kHeldUpMs);
  ~DeviceTransport() override;

  // See ReceiveMemory.
  void bind_reader(void* stream) { memory_->bind_reader(stream); }
  void begin_task() { memory_->begin_task(); }
  void end_task() { memory_->end_task(); }
  const ReceiveMemory& memory() const { return *memory_; }

  const char* name() const override { return channel_->name(); }
  std::int32_t rank() const override { return rank_; }
  std::int32_t num_ranks() const override { return num_ranks_; }
  bool shares_address_space() const override { return false; }
  void set_sink(MessageSink* sink) override;
  void post_send(std::int32_t peer, OutboundMessage* message) override;
  void post_recv(RecvTicket ticket, InboundMessage* buffer) override;
  std::size_t progress(std::int64_t now_ns) override;
  void abort(const Status& status) override;
  bool owes_sends() const override { return num_owed_.load(std::memory_order_acquire) > 0; }  // O1
  void release_streams() override;
  int wait_fd() const override { return epoll_.get(); }

 private:
  struct Departure {
    OutboundMessage* message = nullptr;
    std::uint32_t id = 0;
    std::uint64_t order = 0;  // of the posts to all peers
    bool is_granted = false;
    std::uint32_t computed_us = 0;  // needs_go(): when it was seen to be, to_short_us(); 0: not yet
    GrantBody grant;
    WordPoint sent;
  };
  struct Arrival {
    std::int32_t peer = -1;
    std::uint32_t id = 0;
    std::uint64_t payload_bytes = 0;
    InboundMessage* buffer = nullptr;
    ReceiveSlot* slot = nullptr;
    bool has_go = false;
    std::uint32_t go_sequence = 0;
    std::vector<std::uint64_t> segment_bytes;
    WordPoint arrived;
    Arrival* next = nullptr;
  };
  struct Peer {
    std::vector<Departure> waiting;    // announced: for its grant, and to be computed
    std::vector<Departure> departing;  // started
    std::vector<Arrival*> opening;     // buffer there, no slot yet
    std::vector<Arrival*> arriving;    // granted
    std::vector<WordPoint> handed;     // points of messages that the sink has already; under
                                       // handed_mutex_, for the guard
    std::vector<ReceiveSlot*> unsettled;  // granted when the peer was stopped
    std::uint32_t next_id = 0;
    std::uint32_t next_go_out = 0;
    std::uint32_t next_go_in = 0;
    std::uint32_t num_announced = 0;   // by the peer
    std::uint32_t num_open = 0;        // of these, not yet in the sink's hands, or dropped
    bool said_bye = false;
    std::uint32_t bye_after = 0;       // announcements
    bool is_stopped = false;
    bool was_reported_lost = false;
    bool has_let_go = false;
    std::int64_t settle_until_ns = 0;
    Status why_stopped;
  };

  void on_header(RecvTicket ticket, const MessageHeader& header,
                 std::span<const std::byte> metadata) override;
  void on_message(std::int32_t peer, InboundMessage* message) override;
  void on_sent(OutboundMessage* message, const Status& status) override;
  void on_control(std::int32_t peer, const MessageHeader& header,
                  std::span<const std::byte> body) override;
  void on_peer_lost(std::int32_t peer, const Status& status) override;

  std::size_t take_posted();
  void announce(OutboundMessage* message);
  void on_announce(std::int32_t peer, const MessageHeader& outer,
                   std::span<const std::byte> body);
  void on_grant(std::int32_t peer, std::span<const std::byte> body);
  void on_go(std::int32_t peer, const MessageHeader& outer, std::span<const std::byte> body);
  std::size_t progress_peer(std::int32_t peer_rank);
  void look_for_computed(Peer& peer);
  void open_arrivals(std::int32_t peer_rank);
  std::size_t start_departures(std::int32_t peer_rank);
  bool can_start(std::int32_t peer_rank, const Departure& departure) const;
  void hand_over(std::int32_t peer_rank, Arrival* arrival);
  std::size_t finish_handed(std::int32_t peer_rank);
  void free_streams();
  void free_streams(const Peer& peer);  // those that wait for what it sends
  bool may_streams_wait() const;
  void give_up_progress();
  std::size_t progress_all(std::int64_t now_ns);
  void start_arrivals(std::int32_t peer_rank);
  std::size_t finish_departures(std::int32_t peer_rank);
  std::size_t finish_arrivals(std::int32_t peer_rank);
  std::size_t settle(std::int32_t peer_rank);
  void stop(std::int32_t peer_rank, const Status& status);
  void lose(std::int32_t peer_rank, const Status& status);
  void report_lost(std::int32_t peer_rank, const Status& status);
  void protocol_error(std::int32_t peer_rank, const std::string& what);
  void device_error(const std::string& what);
  bool is_polling() const;
  bool has_settled() const;
  static bool has_left(const Peer& peer);
  Peer& peer_of(std::int32_t rank) { return peers_[static_cast<std::size_t>(rank)]; }
  static void release_inbound(InboundMessage* message);

  OutboundMessage* take_control(MessageType type);
  void send_grant(std::int32_t peer, const GrantBody& grant);
  void send_go(std::int32_t peer, const Departure& departure);
  void free_arrival(Arrival* arrival);

  MessageSink* sink_ = nullptr;
  Descriptor epoll_;
  Doorbell doorbell_;
  bool may_have_slept_ = false;
  OutboundQueue posted_;
  PushList<Arrival> answered_;               // post_recv() has come
  std::vector<std::unique_ptr<Arrival>> arrivals_;
  Arrival* free_arrivals_ = nullptr;
  std::vector<std::unique_ptr<OutboundMessage>> control_messages_;
  OutboundMessage* free_control_ = nullptr;
  const std::int32_t rank_;
  const std::int32_t num_ranks_;
  std::vector<Peer> peers_;
  std::int64_t next_check_ns_ = 0;
  std::uint64_t next_order_ = 0;
  std::string failure_;                      // of a send: nothing is sent any more
  std::int64_t failure_due_ns_ = 0;
  std::atomic<std::int64_t> num_owed_{0};    // O1
  // Device messages posted to each peer. A goodbye counts those that its own thread has seen.
  std::vector<std::atomic<std::uint32_t>> num_posted_;
  std::mutex handed_mutex_;
  std::atomic<bool> are_streams_free_{false};  // a flag; what it means is known from elsewhere

  // A1: abort() stores it with release after why_aborted_; who loads it with acquire may read
  // that one without the mutex, which only orders two aborts.
  std::atomic<bool> is_aborted_{false};
  bool has_ended_all_ = false;
  std::mutex abort_mutex_;
  Status why_aborted_;

  std::shared_ptr<ReceiveMemory> memory_;
  std::unique_ptr<DataChannel> channel_;
  std::unique_ptr<Transport> control_;       // its destructor still enters this sink
  ProgressGuard guard_;                      // last: it uses all the others
};

}  // namespace rrfp
