// How messages end early: abort, the loss of a peer, errors of the device, the destructor.
#include <algorithm>
#include <thread>

#include "base/clock.hpp"
#include "comm/device_transport.hpp"

namespace rrfp {

DeviceTransport::~DeviceTransport() {
  abort({StatusCode::kClosed, rank_,
         "rank " + std::to_string(rank_) + " has closed its transport"});
  progress(steady_now_ns());
  // The peers let go of this rank's memory when they see the connection end.
  control_.reset();
  const std::int64_t deadline_ns = steady_now_ns() + kSettleMs * 1000000;
  while (!has_settled() && steady_now_ns() < deadline_ns) {
    for (std::int32_t peer = 0; peer < num_ranks_; ++peer) settle(peer);
    std::this_thread::yield();
  }
  // Who cannot be seen to have let go may still map this rank's memory, or write to it.
  for (std::int32_t peer = 0; peer < num_ranks_; ++peer) {
    for (ReceiveSlot* slot : peer_of(peer).unsettled) memory_->quarantine(slot);
    if (!channel_->has_settled_recv(peer)) memory_->keep_for_process();
  }
}

// Nobody waits for a peer that was lost: its end cannot be seen in the shared memory.
bool DeviceTransport::has_settled() const {
  for (std::int32_t rank = 0; rank < num_ranks_; ++rank) {
    const Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (!peer.departing.empty()) return false;
    if (!peer.was_reported_lost && !channel_->has_settled_recv(rank)) return false;
  }
  return true;
}

void DeviceTransport::abort(const Status& status) {
  {
    std::lock_guard lock(abort_mutex_);
    if (!is_aborted_.load(std::memory_order_relaxed)) {  // written under the mutex
      why_aborted_ = status;
      is_aborted_.store(true, std::memory_order_release);  // A1
    }
  }
  control_->abort(status);
  release_streams();
}

void DeviceTransport::release_streams() {
  are_streams_free_.store(true, std::memory_order_relaxed);  // a flag alone
  doorbell_.ring();
}

// Streams that wait go on with whatever lies in the payload's place.
void DeviceTransport::free_streams() {
  std::lock_guard lock(handed_mutex_);
  for (const Peer& peer : peers_) free_streams(peer);
}

void DeviceTransport::free_streams(const Peer& peer) {
  for (const WordPoint& arrived : peer.handed) {
    if (!word_reached(arrived)) reach_word(arrived);
  }
}

bool DeviceTransport::may_streams_wait() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return !std::all_of(peer.handed.begin(), peer.handed.end(), word_reached);
  });
}

// The guard's thread: the progress thread has been inside a call for too long.
void DeviceTransport::give_up_progress() {
  sink_->on_peer_lost(rank_, {StatusCode::kDeviceFailed, rank_,
                              "rank " + std::to_string(rank_) +
                                  " could not move messages for a long time: a call of CUDA does "
                                  "not return. A stage that frees device memory (cudaFree, also "
                                  "in torch.cuda.empty_cache()) waits for the whole device"});
  release_streams();
  free_streams();
}

// After a stop: what the device or the peer still had in hand.
std::size_t DeviceTransport::settle(std::int32_t peer_rank) {
  Peer& peer = peer_of(peer_rank);
  const bool is_late = steady_now_ns() > peer.settle_until_ns;
  std::size_t kept = 0;
  for (const Departure& departure : peer.departing) {
    if (is_late || channel_->has_settled_send(peer_rank, departure.sent)) {
      sink_->on_sent(departure.message, peer.why_stopped);
    } else {
      peer.departing[kept++] = departure;
    }
  }
  std::size_t done = peer.departing.size() - kept;
  peer.departing.resize(kept);
  // To unmap memory takes the driver's lock, which a worker may hold while it waits for a stream
  // (the first launch of a kernel does): so not before the last stream is free.
  if (kept == 0 && !is_late && !peer.has_let_go && !may_streams_wait()) {
    channel_->let_go(peer_rank);
    peer.has_let_go = true;
  }
  if (!peer.unsettled.empty() && channel_->has_settled_recv(peer_rank)) {
    for (ReceiveSlot* slot : peer.unsettled) memory_->put_back(slot);
    done += peer.unsettled.size();
    peer.unsettled.clear();
  }
  return done;
}

void DeviceTransport::stop(std::int32_t peer_rank, const Status& status) {
  Peer& peer = peer_of(peer_rank);
  if (peer.is_stopped || peer_rank == rank_) return;
  peer.is_stopped = true;
  peer.why_stopped = status;
  peer.settle_until_ns = steady_now_ns() + kSettleMs * 1000000;
  channel_->stop(peer_rank);
  for (const Departure& departure : peer.waiting) sink_->on_sent(departure.message, status);
  num_owed_.fetch_sub(static_cast<std::int64_t>(peer.waiting.size()),
                      std::memory_order_release);  // O1
  peer.waiting.clear();
  peer.opening.insert(peer.opening.end(), peer.arriving.begin(), peer.arriving.end());
  peer.arriving.clear();
  for (Arrival* arrival : peer.opening) {
    if (arrival->slot != nullptr) peer.unsettled.push_back(arrival->slot);
    arrival->buffer->release(arrival->buffer);
    free_arrival(arrival);
  }
  peer.opening.clear();
}

void DeviceTransport::lose(std::int32_t peer_rank, const Status& status) {
  if (peer_rank == rank_) return;
  stop(peer_rank, status);
  if (is_aborted_.load(std::memory_order_acquire)) return;  // A1
  report_lost(peer_rank, status);
}

void DeviceTransport::report_lost(std::int32_t peer_rank, const Status& status) {
  Peer& peer = peer_of(peer_rank);
  if (peer.was_reported_lost) return;
  peer.was_reported_lost = true;
  sink_->on_peer_lost(peer_rank, status);
  std::lock_guard lock(handed_mutex_);
  free_streams(peer);  // what it owed never comes, and the sink knows that by now
}

void DeviceTransport::protocol_error(std::int32_t peer_rank, const std::string& what) {
  lose(peer_rank, {StatusCode::kProtocol, peer_rank,
                   "rank " + std::to_string(peer_rank) + " sent " + what +
                       "; do all ranks run the same version of rrfp?"});
}

void DeviceTransport::device_error(const std::string& what) {
  const Status status{StatusCode::kDeviceFailed, rank_,
                      "rank " + std::to_string(rank_) + ": " + what +
                          ". An earlier kernel of this process may be the cause; run again with "
                          "CUDA_LAUNCH_BLOCKING set to 1 to see which"};
  for (std::int32_t peer = 0; peer < num_ranks_; ++peer) lose(peer, status);
}

}  // namespace rrfp
