#include "comm/socket_mesh.hpp"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <system_error>

#include "base/cache_line.hpp"
#include "base/check.hpp"
#include "base/clock.hpp"
#include "comm/doorbell.hpp"
#include "comm/outbound_queue.hpp"
#include "comm/socket_address.hpp"
#include "comm/socket_inbox.hpp"
#include "comm/socket_outbox.hpp"

namespace rrfp {

namespace {

constexpr std::size_t kTurnBytes = 1 << 20;
constexpr std::int64_t kFlushNs = Transport::kAbortFlushMs * 1000000;
constexpr int kSendBufferBytes = 4 << 20;  // the kernel gives what net.core.wmem_max allows
constexpr std::uint64_t kDoorbellKey = UINT64_MAX;

struct Connection {
  Connection(std::int32_t self_rank, std::int32_t peer, std::uint64_t run, Descriptor connected)
      : peer_rank(peer), socket(std::move(connected)), is_tcp(!is_unix_socket(socket.get())),
        outbox(self_rank, run), inbox(peer, run) {}

  const std::int32_t peer_rank;
  Descriptor socket;
  const bool is_tcp;
  SocketOutbox outbox;
  SocketInbox inbox;
  // As far as epoll has told; false after the socket answered EAGAIN.
  bool readable = true;
  bool writable = true;
  bool watches_write = false;
  Status end;                // not ok: posts end with this
};

class SocketMesh final : public Transport {
 public:
  SocketMesh(std::int32_t rank, std::uint64_t run, std::vector<Descriptor> connections);
  ~SocketMesh() override;

  const char* name() const override { return "socket"; }
  std::int32_t rank() const override { return rank_; }
  std::int32_t num_ranks() const override { return static_cast<std::int32_t>(peers_.size()); }
  bool shares_address_space() const override { return false; }
  void set_sink(MessageSink* sink) override { sink_ = sink; }
  void post_send(std::int32_t peer, OutboundMessage* message) override;
  void post_recv(RecvTicket ticket, InboundMessage* buffer) override;
  std::size_t progress(std::int64_t now_ns) override;
  void abort(const Status& status) override;
  int wait_fd() const override { return epoll_.get(); }

 private:
  Connection* connection(std::int32_t peer) { return peers_[static_cast<std::size_t>(peer)].get(); }
  void watch(int operation, int fd, std::uint32_t events, std::uint64_t key);
  void watch_writes(Connection& peer, bool on);
  std::size_t take_posted();
  void poll_events();
  std::size_t serve(Connection& peer);
  std::size_t write(Connection& peer);
  std::size_t read(Connection& peer);
  void end(Connection& peer, const Status& status, bool quiet);
  Status ended_status(const Connection& peer, const std::string& seen) const;
  std::size_t advance_abort(std::int64_t now_ns);
  bool is_flushed() const;

  const std::int32_t rank_;
  std::vector<std::unique_ptr<Connection>> peers_;  // by rank; null at rank_
  Descriptor epoll_;
  Doorbell doorbell_;
  alignas(kCacheLineBytes) OutboundQueue posted_;  // written by the workers
  MessageSink* sink_ = nullptr;
  std::size_t first_turn_ = 0;

  std::mutex abort_mutex_;
  Status abort_status_;
  std::atomic<bool> aborted_{false};
  // The progress thread's own.
  bool abort_begun_ = false;
  std::int64_t abort_deadline_ns_ = 0;
};

SocketMesh::SocketMesh(std::int32_t rank, std::uint64_t run, std::vector<Descriptor> connections)
    : rank_(rank), epoll_(Descriptor::open([] { return epoll_create1(EPOLL_CLOEXEC); })) {
  if (!epoll_) throw std::system_error(errno, std::generic_category(), "rrfp: epoll_create1");
  watch(EPOLL_CTL_ADD, doorbell_.fd(), EPOLLIN | EPOLLET, kDoorbellKey);
  for (std::size_t i = 0; i < connections.size(); ++i) {
    peers_.push_back(nullptr);
    if (!connections[i]) continue;
    peers_.back() = std::make_unique<Connection>(rank, static_cast<std::int32_t>(i), run,
                                                 std::move(connections[i]));
    // Fewer wake-ups for a large payload; works without.
    (void)setsockopt(peers_.back()->socket.get(), SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes,
                     sizeof kSendBufferBytes);
    watch(EPOLL_CTL_ADD, peers_.back()->socket.get(), EPOLLIN | EPOLLRDHUP | EPOLLET, i);
  }
}

SocketMesh::~SocketMesh() {
  if (process_was_forked() || sink_ == nullptr) return;
  abort(Status{StatusCode::kClosed, rank_,
               "rank " + std::to_string(rank_) + " has closed its transport"});
  const std::int64_t deadline_ns = steady_now_ns() + kFlushNs;
  for (std::int64_t now_ns = 0; now_ns < deadline_ns;) {
    now_ns = steady_now_ns();
    if (progress(now_ns) > 0) continue;
    if (is_flushed()) break;
    pollfd waiting{epoll_.get(), POLLIN, 0};
    (void)::poll(&waiting, 1, 10);
  }
  take_posted();
  for (auto& peer : peers_) {
    if (peer != nullptr) peer->outbox.drop_all(*sink_, abort_status_);
  }
}

void SocketMesh::watch(int operation, int fd, std::uint32_t events, std::uint64_t key) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = key;
  if (epoll_ctl(epoll_.get(), operation, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "rrfp: epoll_ctl");
  }
}

// A peer that keeps up would wake us after each message it takes: writability is watched only
// while the socket is full.
void SocketMesh::watch_writes(Connection& peer, bool on) {
  if (peer.watches_write == on) return;
  peer.watches_write = on;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLET | (on ? EPOLLOUT : 0u);
  event.data.u64 = static_cast<std::uint64_t>(peer.peer_rank);
  const int result = epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.socket.get(), &event);
  RRFP_INVARIANT(result == 0, std::string("epoll_ctl: ") + std::strerror(errno));
}

void SocketMesh::post_send(std::int32_t peer, OutboundMessage* message) {
  RRFP_INVARIANT(peer >= 0 && peer < num_ranks() && peer != rank_,
                 "rank " + std::to_string(rank_) + " posts to rank " + std::to_string(peer));
  message->peer = peer;
  posted_.push(message);
  doorbell_.ring();
}

void SocketMesh::post_recv(RecvTicket ticket, InboundMessage* buffer) {
  connection(ticket.peer)->inbox.answer(ticket, buffer);
  doorbell_.ring();
}

std::size_t SocketMesh::progress(std::int64_t now_ns) {
  doorbell_.answer();
  // Looked at first: what was posted before an abort is then in this take, not in a later one.
  const bool aborted = aborted_.load(std::memory_order_acquire);  // A1
  std::size_t num_events = take_posted();
  if (aborted) num_events += advance_abort(now_ns);
  poll_events();
  first_turn_ = (first_turn_ + 1) % peers_.size();
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    Connection* peer = peers_[(first_turn_ + i) % peers_.size()].get();
    if (peer != nullptr && peer->socket) num_events += serve(*peer);
  }
  // Rung while we looked: the caller must come again before it sleeps.
  if (num_events == 0 && !doorbell_.try_sleep()) return 1;
  return num_events;
}

std::size_t SocketMesh::take_posted() {
  std::size_t count = 0;
  OutboundMessage* message = posted_.take_all();
  while (message != nullptr) {
    OutboundMessage* next = message->next;
    Connection& peer = *connection(message->peer);
    if (abort_begun_) {
      sink_->on_sent(message, abort_status_);
    } else if (!peer.end.ok()) {
      sink_->on_sent(message, peer.end);
    } else {
      peer.outbox.add(message);
    }
    message = next;
    ++count;
  }
  return count;
}

void SocketMesh::poll_events() {
  epoll_event events[64];
  int count = 0;
  do {
    count = epoll_wait(epoll_.get(), events, 64, 0);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == kDoorbellKey) continue;
      Connection& peer = *peers_[events[i].data.u64];
      const std::uint32_t what = events[i].events;
      if (what & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) peer.readable = true;
      if (what & (EPOLLOUT | EPOLLHUP | EPOLLERR)) peer.writable = true;
    }
  } while (count == 64);
}

std::size_t SocketMesh::serve(Connection& peer) {
  std::size_t num_events = 0;
  if (peer.writable && !peer.outbox.empty()) num_events += write(peer);
  if (!peer.socket) return num_events;
  const bool can_read = peer.inbox.is_paused() ? peer.inbox.is_answered() : peer.readable;
  if (can_read) num_events += read(peer);
  return num_events;
}

std::size_t SocketMesh::write(Connection& peer) {
  const auto written = peer.outbox.write(peer.socket.get(), kTurnBytes, *sink_);
  const bool blocked = written.outcome == SocketOutbox::Outcome::kBlocked;
  if (blocked) peer.writable = false;
  const int write_errno = errno;
  watch_writes(peer, blocked);
  if (written.outcome == SocketOutbox::Outcome::kBroken) {
    if (write_errno == EPIPE || write_errno == ECONNRESET) {
      // What the peer wrote before its end went, a kAbort or kBye perhaps, is still to be read:
      // the reading side finds the end, and ends what waits here.
      peer.writable = false;
      peer.readable = true;
    } else {
      end(peer, ended_status(peer, std::strerror(write_errno)), peer.inbox.bye_received());
    }
    return 1;
  }
  return written.num_sent + (written.bytes > 0 ? 1 : 0);
}

std::size_t SocketMesh::read(Connection& peer) {
  const auto result = peer.inbox.read(peer.socket.get(), kTurnBytes, *sink_);
  switch (result.outcome) {
    case SocketInbox::Outcome::kMore:
    case SocketInbox::Outcome::kPaused:
      return result.num_events;
    case SocketInbox::Outcome::kDrained:
      peer.readable = false;
      return result.num_events;
    case SocketInbox::Outcome::kEnded:
      end(peer, ended_status(peer, "end of file"), peer.inbox.bye_received());
      break;
    case SocketInbox::Outcome::kBroken:
      end(peer, ended_status(peer, std::strerror(errno)), peer.inbox.bye_received());
      break;
    case SocketInbox::Outcome::kMalformed:
      end(peer,
          Status{StatusCode::kProtocol, rank_,
                 "rank " + std::to_string(rank_) + " received a malformed message header from "
                 "rank " + std::to_string(peer.peer_rank) + ": " + peer.inbox.defect() +
                 ". The connection was closed. All ranks must run the same version of rrfp."},
          false);
      break;
  }
  return result.num_events + 1;
}

Status SocketMesh::ended_status(const Connection& peer, const std::string& seen) const {
  const std::string who = "rank " + std::to_string(peer.peer_rank);
  if (peer.inbox.bye_received()) {
    return Status{StatusCode::kClosed, peer.peer_rank, who + " has closed its pipeline"};
  }
  return Status{StatusCode::kPeerLost, peer.peer_rank,
                "rank " + std::to_string(rank_) + " lost " + who + ": its connection gave \"" +
                    seen + "\" " + peer.inbox.position() +
                    ", so its process has ended. Look at the output of " + who + " first."};
}

void SocketMesh::end(Connection& peer, const Status& status, bool quiet) {
  peer.end = status;
  peer.socket.close();
  peer.inbox.close();
  if (!quiet && !abort_begun_) sink_->on_peer_lost(peer.peer_rank, status);
  peer.outbox.drop_all(*sink_, status);
}

void SocketMesh::abort(const Status& status) {
  {
    std::lock_guard lock(abort_mutex_);
    if (aborted_.load(std::memory_order_relaxed)) return;  // under the mutex
    abort_status_ = status;
    aborted_.store(true, std::memory_order_release);       // A1
  }
  doorbell_.ring();
}

std::size_t SocketMesh::advance_abort(std::int64_t now_ns) {
  if (!abort_begun_) {
    abort_begun_ = true;
    abort_deadline_ns_ = now_ns + kFlushNs;
    for (auto& peer : peers_) {
      if (peer == nullptr || !peer->socket) continue;
      // Reading goes on, so that a peer that flushes its own end is not held up by ours.
      peer->inbox.discard();
      peer->outbox.drop_unstarted(*sink_, abort_status_, true);
    }
    return 1;
  }
  if (now_ns < abort_deadline_ns_) return 0;
  for (auto& peer : peers_) {
    if (peer != nullptr && peer->socket && !peer->outbox.empty()) end(*peer, abort_status_, true);
  }
  return 0;
}

// Closing a TCP socket with something unread in it throws away what the peer's host has not
// acknowledged, the farewell perhaps.
bool SocketMesh::is_flushed() const {
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    if (!peer->outbox.empty()) return false;
    int unacknowledged_bytes = 0;
    if (peer->is_tcp && peer->socket &&
        ioctl(peer->socket.get(), SIOCOUTQ, &unacknowledged_bytes) == 0 &&
        unacknowledged_bytes > 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::unique_ptr<Transport> make_socket_mesh(std::int32_t rank, std::uint64_t run,
                                            std::vector<Descriptor> connections) {
  return std::make_unique<SocketMesh>(rank, run, std::move(connections));
}

}  // namespace rrfp
