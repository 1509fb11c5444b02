#include "comm/local_transport.hpp"

#include <atomic>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "base/check.hpp"
#include "comm/slot_table.hpp"

namespace rrfp {

namespace {

// Where an open data message stands, as one word. An even word is kAnswered: the buffer that
// post_recv() gave while the sender was still inside on_header(). An odd one holds the source
// rank and a phase. Only who moves the word to kEnding may end the message.
enum class Phase : std::uintptr_t { kFree, kOffered, kWaiting, kEnding };

constexpr std::uintptr_t phase_word(Phase phase, std::int32_t source_rank) {
  return static_cast<std::uintptr_t>(source_rank) << 3 | static_cast<std::uintptr_t>(phase) << 1 |
         1;
}

// The slots of an endpoint's table: messages to it, between on_header() and their end. Slots of
// messages ended by an abort are not used again, so that a late post_recv() finds kEnding there.
// L1: `word` moves by seq_cst operations; `message` is written before kOffered and read by the
// thread that moved the word on.
struct OpenMessage {
  std::atomic<std::uintptr_t> word{phase_word(Phase::kFree, 0)};
  OutboundMessage* message = nullptr;
};

// What the hub keeps of a rank; outlives the rank's transport.
struct Endpoint {
  explicit Endpoint(std::size_t num_ranks) : sequences(num_ranks), said_bye(num_ranks) {}

  SlotTable<OpenMessage> open;
  SlotTable<OpenMessage>::FreeList free_slots;
  std::atomic<MessageSink*> sink{nullptr};
  // L2: who posts, enters the sink or starts to wait for a buffer first says so (posted, inside,
  // the word) and then looks at `closed`; who closes sets it and then looks at those. All
  // seq_cst, so that one of the two sees the other.
  std::atomic<std::int64_t> posted{0};  // messages of this rank not yet given back
  std::atomic<std::int64_t> inside{0};  // threads inside this rank's sink, or about to look
  std::atomic<bool> closed{false};
  std::mutex status_mutex;
  Status status;  // why it is closed; complete before `closed`
  std::vector<std::atomic<std::uint32_t>> sequences;  // of messages sent, by peer
  std::vector<std::atomic<bool>> said_bye;            // by peer

  Status why_closed() {
    std::lock_guard lock(status_mutex);
    return status;
  }
};

using Hub = std::vector<std::unique_ptr<Endpoint>>;

// The right to be inside the sink of an endpoint; none (a null sink) when it is closed.
class Visit {
 public:
  explicit Visit(Endpoint& endpoint) : endpoint_(endpoint) {
    ++endpoint_.inside;                                        // L2
    if (!endpoint_.closed) sink_ = endpoint_.sink;             // L2
  }
  ~Visit() { --endpoint_.inside; }                             // L2
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  MessageSink* sink() const { return sink_; }

 private:
  Endpoint& endpoint_;
  MessageSink* sink_ = nullptr;
};

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<Hub> hub, std::int32_t rank)
      : hub_(std::move(hub)), rank_(rank), self_(endpoint(rank)) {}
  ~LocalTransport() override;

  const char* name() const override { return "local"; }
  std::int32_t rank() const override { return rank_; }
  std::int32_t num_ranks() const override { return static_cast<std::int32_t>(hub_->size()); }
  bool shares_address_space() const override { return true; }
  void set_sink(MessageSink* sink) override { self_.sink = sink; }
  void post_send(std::int32_t peer, OutboundMessage* message) override;
  void post_recv(RecvTicket ticket, InboundMessage* buffer) override;
  std::size_t progress(std::int64_t) override { return 0; }
  void abort(const Status& status) override;
  int wait_fd() const override { return -1; }

 private:
  Endpoint& endpoint(std::int32_t rank) const { return *(*hub_)[static_cast<std::size_t>(rank)]; }
  void give_back(OutboundMessage* message, const Status& status);
  void offer(Endpoint& receiver, MessageSink& sink, OutboundMessage* message);
  void deliver(Endpoint& receiver, std::uint32_t index, InboundMessage* buffer);
  void drop_waiting(Endpoint& receiver, std::uint32_t index, std::int32_t source_rank);

  std::shared_ptr<Hub> hub_;
  std::int32_t rank_;
  Endpoint& self_;
};

// The sender's sink is there: its destructor waits for `posted`.
void LocalTransport::give_back(OutboundMessage* message, const Status& status) {
  Endpoint& sender = endpoint(message->header.source_rank);
  sender.sink.load()->on_sent(message, status);
  --sender.posted;  // L2
}

void LocalTransport::post_send(std::int32_t peer, OutboundMessage* message) {
  RRFP_INVARIANT(peer >= 0 && peer < num_ranks() && peer != rank_,
                 "rank " + std::to_string(rank_) + " posts to rank " + std::to_string(peer));
  const auto peer_index = static_cast<std::size_t>(peer);
  message->peer = peer;
  message->next = nullptr;
  MessageHeader& header = message->header;
  header.magic = kMessageMagic;
  header.version = kWireVersion;
  header.run = 0;
  header.source_rank = rank_;
  header.sequence = self_.sequences[peer_index]++;
  header.metadata_bytes = static_cast<std::uint32_t>(message->metadata.size());
  header.payload_bytes = total_payload_bytes(*message);

  ++self_.posted;                                                        // L2
  if (self_.closed) return give_back(message, self_.why_closed());       // L2
  Endpoint& receiver = endpoint(peer);
  Visit visit(receiver);
  if (visit.sink() == nullptr) {
    RRFP_INVARIANT(receiver.closed, "rank " + std::to_string(rank_) + " posted to rank " +
                                        std::to_string(peer) + ", whose sink is not set yet");
    return give_back(message, receiver.why_closed());
  }
  if (header.type == MessageType::kData) return offer(receiver, *visit.sink(), message);
  if (header.type == MessageType::kBye) self_.said_bye[peer_index] = true;
  visit.sink()->on_control(rank_, header, message->metadata);
  give_back(message, Status{});
}

void LocalTransport::offer(Endpoint& receiver, MessageSink& sink, OutboundMessage* message) {
  std::uint32_t index = receiver.open.pop(receiver.free_slots);
  if (index == SlotTable<OpenMessage>::kNone) {
    try {
      index = receiver.open.add();
    } catch (const std::bad_alloc&) {
      return give_back(message, Status{StatusCode::kStageFailed, rank_,
                                       "rank " + std::to_string(rank_) + " is out of memory"});
    }
  }
  OpenMessage& open = receiver.open[index];
  open.message = message;
  open.word = phase_word(Phase::kOffered, rank_);                                    // L1
  sink.on_header(RecvTicket{rank_, index}, message->header, message->metadata);
  std::uintptr_t word = phase_word(Phase::kOffered, rank_);
  if (open.word.compare_exchange_strong(word, phase_word(Phase::kWaiting, rank_))) {  // L1, L2
    if (self_.closed || receiver.closed) drop_waiting(receiver, index, rank_);        // L2
    return;
  }
  open.word = phase_word(Phase::kEnding, rank_);  // it was kAnswered: nobody else moves it on
  deliver(receiver, index, reinterpret_cast<InboundMessage*>(word));
}

void LocalTransport::post_recv(RecvTicket ticket, InboundMessage* buffer) {
  const auto index = static_cast<std::uint32_t>(ticket.id);
  OpenMessage& open = self_.open[index];
  std::uintptr_t word = phase_word(Phase::kOffered, ticket.peer);
  if (open.word.compare_exchange_strong(word, reinterpret_cast<std::uintptr_t>(buffer))) {  // L1
    return;  // the sender delivers when on_header() has returned
  }
  word = phase_word(Phase::kWaiting, ticket.peer);
  if (open.word.compare_exchange_strong(word, phase_word(Phase::kEnding, ticket.peer))) {   // L1
    return deliver(self_, index, buffer);
  }
  if (buffer->release != nullptr) buffer->release(buffer);  // ended by an abort
}

// The caller moved the word to kEnding.
void LocalTransport::deliver(Endpoint& receiver, std::uint32_t index, InboundMessage* buffer) {
  OutboundMessage* message = receiver.open[index].message;
  Visit visit(receiver);
  if (visit.sink() == nullptr) {
    if (buffer->release != nullptr) buffer->release(buffer);
    return give_back(message, receiver.why_closed());
  }
  copy_segments(*message, buffer->payload);
  buffer->attachment = std::exchange(message->attachment, nullptr);
  receiver.open[index].word = phase_word(Phase::kFree, 0);  // L1
  receiver.open.push(receiver.free_slots, index);
  visit.sink()->on_message(message->header.source_rank, buffer);
  give_back(message, Status{});
}

// Ends a message that waits for a buffer, because one side is closed; nothing if it was taken.
void LocalTransport::drop_waiting(Endpoint& receiver, std::uint32_t index,
                                  std::int32_t source_rank) {
  OpenMessage& open = receiver.open[index];
  std::uintptr_t word = phase_word(Phase::kWaiting, source_rank);
  if (!open.word.compare_exchange_strong(word, phase_word(Phase::kEnding, source_rank))) return;
  give_back(open.message, self_.closed ? self_.why_closed() : receiver.why_closed());
}

void LocalTransport::abort(const Status& status) {
  {
    std::lock_guard lock(self_.status_mutex);
    if (self_.closed) return;
    self_.status = status;
    self_.closed = true;  // L2
  }
  for (std::int32_t rank = 0; rank < num_ranks(); ++rank) {
    Endpoint& other = endpoint(rank);
    for (std::uint32_t i = 0; i < other.open.size(); ++i) {
      for (std::int32_t source = 0; source < num_ranks(); ++source) {
        if (rank == rank_ || source == rank_) drop_waiting(other, i, source);
      }
    }
  }
}

LocalTransport::~LocalTransport() {
  const std::string who = "rank " + std::to_string(rank_);
  abort(Status{StatusCode::kClosed, rank_, who + " has closed its transport"});
  const Status lost{StatusCode::kPeerLost, rank_, who + " closed its transport without a goodbye."};
  for (std::int32_t peer = 0; peer < num_ranks() && self_.sink.load() != nullptr; ++peer) {
    if (peer == rank_ || self_.said_bye[static_cast<std::size_t>(peer)]) continue;
    Visit visit(endpoint(peer));
    if (visit.sink() != nullptr) visit.sink()->on_peer_lost(rank_, lost);
  }
  // L2. Bounded by the callbacks that other threads are in: they do not block.
  while (self_.posted != 0 || self_.inside != 0) std::this_thread::yield();
}

}  // namespace

std::vector<std::unique_ptr<Transport>> make_local_transports(std::int32_t num_ranks) {
  RRFP_CHECK(num_ranks > 0, "num_ranks is " + std::to_string(num_ranks) + "; give 1 or more");
  auto hub = std::make_shared<Hub>();
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    hub->push_back(std::make_unique<Endpoint>(static_cast<std::size_t>(num_ranks)));
  }
  std::vector<std::unique_ptr<Transport>> transports;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    transports.push_back(std::make_unique<LocalTransport>(hub, rank));
  }
  return transports;
}

}  // namespace rrfp
