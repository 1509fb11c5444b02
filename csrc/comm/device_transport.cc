#include "comm/device_transport.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/clock.hpp"

namespace rrfp {

namespace {

bool is_own_type(MessageType type) {
  return type == MessageType::kAnnounce || type == MessageType::kGrant ||
         type == MessageType::kGo;
}

}  // namespace

DeviceTransport::DeviceTransport(std::unique_ptr<Transport> control,
                                 std::unique_ptr<DataChannel> channel,
                                 std::shared_ptr<ReceiveMemory> memory, std::int64_t held_up_ms)
    : epoll_(Descriptor::open([] { return epoll_create1(EPOLL_CLOEXEC); })),
      rank_(control->rank()),
      num_ranks_(control->num_ranks()),
      peers_(static_cast<std::size_t>(control->num_ranks())),
      num_posted_(peers_.size()),
      memory_(std::move(memory)),
      channel_(std::move(channel)),
      control_(std::move(control)),
      guard_(held_up_ms, [this] { give_up_progress(); }) {
  epoll_event of_doorbell{EPOLLIN | EPOLLET, {}};
  epoll_event of_control{EPOLLIN, {}};
  if (!epoll_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, doorbell_.fd(), &of_doorbell) != 0 ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, control_->wait_fd(), &of_control) != 0) {
    throw std::system_error(errno, std::generic_category(), "rrfp: epoll of a device transport");
  }
  control_->set_sink(this);
}

void DeviceTransport::set_sink(MessageSink* sink) { sink_ = sink; }

void DeviceTransport::post_send(std::int32_t peer, OutboundMessage* message) {
  std::atomic<std::uint32_t>& num_posted = num_posted_[static_cast<std::size_t>(peer)];
  if (!is_device_data(message->header)) {
    if (message->header.type == MessageType::kBye) {
      message->header.duration_us = num_posted.load(std::memory_order_relaxed);  // a count alone
    }
    control_->post_send(peer, message);
    return;
  }
  num_posted.fetch_add(1, std::memory_order_relaxed);  // a count alone
  message->peer = peer;
  num_owed_.fetch_add(1, std::memory_order_relaxed);  // O1: the caller's own, before it looks
  posted_.push(message);
  doorbell_.ring();
}

void DeviceTransport::post_recv(RecvTicket ticket, InboundMessage* buffer) {
  if (!is_device_data(buffer->header)) {
    control_->post_recv(ticket, buffer);
    return;
  }
  auto* arrival = reinterpret_cast<Arrival*>(ticket.id);
  arrival->buffer = buffer;
  answered_.push(arrival);
  doorbell_.ring();
}

std::size_t DeviceTransport::progress(std::int64_t now_ns) {
  guard_.enter(steady_now_ns());
  const std::size_t done = progress_all(now_ns);
  guard_.leave();
  return done;
}

std::size_t DeviceTransport::progress_all(std::int64_t now_ns) {
  if (may_have_slept_) {
    // Takes the edge-triggered doorbell off the list, so that the descriptor falls silent.
    epoll_event events[2];
    while (epoll_wait(epoll_.get(), events, 2, 0) < 0 && errno == EINTR) {
    }
    may_have_slept_ = false;
  }
  doorbell_.answer();
  std::size_t done = control_->progress(now_ns);
  if (!has_ended_all_ && is_aborted_.load(std::memory_order_acquire)) {  // A1
    for (std::int32_t peer = 0; peer < num_ranks_; ++peer) stop(peer, why_aborted_);
    has_ended_all_ = true;
  }
  // relaxed: a flag alone, looked at again soon.
  if (are_streams_free_.load(std::memory_order_relaxed)) free_streams();
  done += take_posted();
  for (std::int32_t peer = 0; peer < num_ranks_; ++peer) done += progress_peer(peer);
  if (!failure_.empty() && steady_now_ns() >= failure_due_ns_) device_error(failure_);
  if (done > 0) return done;
  if (is_polling()) {
    // The device's words again, a few times for each look at the sockets, which cost more.
    for (int i = 0; i < kPollsPerProgress && done == 0; ++i) {
      for (std::int32_t peer = 0; peer < num_ranks_; ++peer) done += progress_peer(peer);
    }
    if (now_ns >= next_check_ns_) {
      next_check_ns_ = now_ns + kCheckDeviceMs * 1000000;
      const std::string what = channel_->check_device();
      if (!what.empty()) device_error(what);
    }
    return std::max<std::size_t>(done, 1);
  }
  may_have_slept_ = true;
  return doorbell_.try_sleep() ? 0 : 1;
}

bool DeviceTransport::is_polling() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    // A peer's word may take until its end: unsettled memory is looked at, not spun on.
    return !peer.departing.empty() || (!peer.arriving.empty() && !peer.is_stopped) ||
           (!peer.handed.empty() && !peer.is_stopped) || !peer.opening.empty() ||
           std::any_of(peer.waiting.begin(), peer.waiting.end(),
                       [](const Departure& departure) { return departure.is_granted; });
  });
}

std::size_t DeviceTransport::take_posted() {
  std::size_t taken = 0;
  for (OutboundMessage* message = posted_.take_all(); message != nullptr; ++taken) {
    OutboundMessage* const next = message->next;
    announce(message);
    message = next;
  }
  for (Arrival* arrival = answered_.take_all(); arrival != nullptr; ++taken) {
    Arrival* const next = arrival->next;
    Peer& peer = peer_of(arrival->peer);
    if (peer.is_stopped) {
      arrival->buffer->release(arrival->buffer);
      free_arrival(arrival);
    } else {
      peer.opening.push_back(arrival);
    }
    arrival = next;
  }
  return taken;
}

std::size_t DeviceTransport::progress_peer(std::int32_t peer_rank) {
  Peer& peer = peer_of(peer_rank);
  if (peer.is_stopped) return settle(peer_rank);
  open_arrivals(peer_rank);
  if (channel_->needs_go()) start_arrivals(peer_rank);
  const std::size_t started = start_departures(peer_rank);
  if (peer.is_stopped) return settle(peer_rank);  // a device error: no word is believed now
  std::size_t done = started + finish_departures(peer_rank) + finish_arrivals(peer_rank);
  if (has_left(peer)) {
    stop(peer_rank, {StatusCode::kClosed, peer_rank,
                     "rank " + std::to_string(peer_rank) + " has closed its pipeline"});
    ++done;
  }
  return done;
}

// Nothing is on its way from a peer that said goodbye, or to it.
bool DeviceTransport::has_left(const Peer& peer) {
  const auto num_missing = static_cast<std::int32_t>(peer.bye_after - peer.num_announced);
  return peer.said_bye && num_missing <= 0 && peer.num_open == 0 && peer.departing.empty() &&
         peer.handed.empty();
}

void DeviceTransport::open_arrivals(std::int32_t peer_rank) {
  Peer& peer = peer_of(peer_rank);
  std::size_t kept = 0;
  for (Arrival* arrival : peer.opening) {
    GrantBody grant;
    ReceiveSlot* slot = memory_->take(arrival->payload_bytes);
    if (slot != nullptr && !channel_->open_recv(peer_rank, *slot, &grant, &arrival->arrived)) {
      memory_->put_back(slot);
      slot = nullptr;
    }
    if (slot == nullptr) {
      peer.opening[kept++] = arrival;
      continue;
    }
    arrival->slot = slot;
    grant.id = arrival->id;
    send_grant(peer_rank, grant);
    if (channel_->follows_streams(peer_rank)) {
      hand_over(peer_rank, arrival);
    } else {
      peer.arriving.push_back(arrival);
    }
  }
  peer.opening.resize(kept);
  // No memory and nothing on its way that could bring some back.
  if (kept > 0 && peer.arriving.empty() && peer.handed.empty() && !memory_->refusal().empty() &&
      !memory_->has_slots_out()) {
    device_error(memory_->refusal());
  }
}

bool DeviceTransport::can_start(std::int32_t peer_rank, const Departure& departure) const {
  if (!departure.is_granted || !channel_->can_start_send(peer_rank)) return false;
  if (word_reached(departure.message->computed)) return true;
  if (!channel_->follows_streams(peer_rank)) return false;
  int num_queued = 0;
  for (std::int32_t rank = 0; rank < num_ranks_; ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (!peer.waiting.empty() && peer.waiting.front().order < departure.order) return false;
    num_queued += rank != peer_rank && !peer.departing.empty();
  }
  return num_queued < kMaxQueuedPeers;
}

// A channel whose sender says when it starts can say as well since when it could have.
void DeviceTransport::look_for_computed(Peer& peer) {
  for (Departure& departure : peer.waiting) {
    if (departure.computed_us != 0 || !word_reached(departure.message->computed)) continue;
    departure.computed_us = to_short_us(steady_now_ns());
  }
}

std::size_t DeviceTransport::start_departures(std::int32_t peer_rank) {
  Peer& peer = peer_of(peer_rank);
  if (channel_->needs_go()) look_for_computed(peer);
  std::size_t started = 0;
  for (auto departure = peer.waiting.begin(); departure != peer.waiting.end();) {
    if (!failure_.empty()) break;
    if (!can_start(peer_rank, *departure)) {
      ++departure;
      continue;
    }
    if (channel_->needs_go()) send_go(peer_rank, *departure);
    failure_ = channel_->start_send(peer_rank, *departure->message, departure->grant,
                                    &departure->sent);
    if (!failure_.empty()) {
      failure_due_ns_ = steady_now_ns() + kPatienceMs * 1000000;
      break;
    }
    peer.departing.push_back(*departure);
    departure = peer.waiting.erase(departure);
    num_owed_.fetch_sub(1, std::memory_order_release);  // O1
    ++started;
  }
  return started;
}

// The payload has its place, and a word will say that it is there.
void DeviceTransport::hand_over(std::int32_t peer_rank, Arrival* arrival) {
  InboundMessage* message = arrival->buffer;
  message->payload = arrival->slot->data;
  message->payload_owner = arrival->slot;
  message->device_index = memory_->device();
  message->pool_release = message->release;
  message->release = release_inbound;
  message->arrived = {};
  if (!word_reached(arrival->arrived)) {
    message->arrived = arrival->arrived;
    std::lock_guard lock(handed_mutex_);
    peer_of(peer_rank).handed.push_back(arrival->arrived);
  } else {
    channel_->close_recv(peer_rank, arrival->arrived);
  }
  free_arrival(arrival);
  sink_->on_message(peer_rank, message);
}

void DeviceTransport::start_arrivals(std::int32_t peer_rank) {
  Peer& peer = peer_of(peer_rank);
  for (Arrival* arrival : peer.arriving) {
    if (!arrival->has_go || arrival->arrived.word != nullptr ||
        arrival->go_sequence != peer.next_go_in || !channel_->can_start_recv(peer_rank)) {
      continue;
    }
    ++peer.next_go_in;
    const std::string failure = channel_->start_recv(peer_rank, arrival->segment_bytes,
                                                     arrival->slot->data, &arrival->arrived);
    if (!failure.empty()) {
      device_error(failure);
      return;
    }
  }
}

std::size_t DeviceTransport::finish_departures(std::int32_t peer_rank) {
  Peer& peer = peer_of(peer_rank);
  std::size_t kept = 0;
  for (const Departure& departure : peer.departing) {
    if (word_reached(departure.sent)) {
      sink_->on_sent(departure.message, Status{});
    } else {
      peer.departing[kept++] = departure;
    }
  }
  const std::size_t done = peer.departing.size() - kept;
  peer.departing.resize(kept);
  return done;
}

std::size_t DeviceTransport::finish_arrivals(std::int32_t peer_rank) {
  Peer& peer = peer_of(peer_rank);
  std::size_t kept = 0;
  for (Arrival* arrival : peer.arriving) {
    if (arrival->arrived.word == nullptr || !word_reached(arrival->arrived)) {
      peer.arriving[kept++] = arrival;
      continue;
    }
    hand_over(peer_rank, arrival);
  }
  const std::size_t done = peer.arriving.size() - kept;
  peer.arriving.resize(kept);
  return done + finish_handed(peer_rank);
}

std::size_t DeviceTransport::finish_handed(std::int32_t peer_rank) {
  std::vector<WordPoint>& handed = peer_of(peer_rank).handed;
  if (handed.empty()) return 0;
  std::lock_guard lock(handed_mutex_);
  const std::size_t done = std::erase_if(handed, [&](const WordPoint& arrived) {
    if (!word_reached(arrived)) return false;
    channel_->close_recv(peer_rank, arrived);
    return true;
  });
  if (done > 0) sink_->on_arrived();
  return done;
}

void DeviceTransport::release_inbound(InboundMessage* message) {
  ReceiveMemory::give_back(static_cast<ReceiveSlot*>(message->payload_owner));
  message->payload = nullptr;
  message->payload_owner = nullptr;
  message->device_index = -1;
  message->arrived = {};
  message->release = message->pool_release;
  message->release(message);
}

void DeviceTransport::on_header(RecvTicket ticket, const MessageHeader& header,
                                std::span<const std::byte> metadata) {
  sink_->on_header(ticket, header, metadata);
}

void DeviceTransport::on_message(std::int32_t peer, InboundMessage* message) {
  sink_->on_message(peer, message);
}

void DeviceTransport::on_sent(OutboundMessage* message, const Status& status) {
  if (!is_own_type(message->header.type)) {
    sink_->on_sent(message, status);
    return;
  }
  // The connection ended after a goodbye: what was announced or granted there will not come.
  if (!status.ok()) stop(message->peer, status);
  message->next = free_control_;
  free_control_ = message;
}

void DeviceTransport::on_control(std::int32_t peer, const MessageHeader& header,
                                 std::span<const std::byte> body) {
  if (!is_own_type(header.type)) {
    if (header.type == MessageType::kBye) {
      peer_of(peer).said_bye = true;
      peer_of(peer).bye_after = header.duration_us;
    }
    sink_->on_control(peer, header, body);
    return;
  }
  if (peer_of(peer).is_stopped) return;
  if (header.type == MessageType::kAnnounce) on_announce(peer, header, body);
  if (header.type == MessageType::kGrant) on_grant(peer, body);
  if (header.type == MessageType::kGo) on_go(peer, header, body);
}

void DeviceTransport::on_peer_lost(std::int32_t peer, const Status& status) {
  stop(peer, status);
  report_lost(peer, status);
}

void DeviceTransport::free_arrival(Arrival* arrival) {
  --peer_of(arrival->peer).num_open;
  arrival->buffer = nullptr;
  arrival->slot = nullptr;
  arrival->has_go = false;
  arrival->arrived = {};
  arrival->next = free_arrivals_;
  free_arrivals_ = arrival;
}

}  // namespace rrfp
