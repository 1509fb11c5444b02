#include "runtime/peer_watch.hpp"

#include <algorithm>
#include <utility>

#include "base/clock.hpp"
#include "base/task.hpp"

namespace rrfp {

namespace {

bool is_in_step(const RankState& state) {
  return state.activity == Activity::kWaiting || state.activity == Activity::kRunning ||
         state.activity == Activity::kTying;
}

// Whether a rank in this state still has to enter step `step`.
bool is_before(const RankState& state, std::uint32_t step) {
  return !is_in_step(state) && (state.step == kNoStep || state.step < step);
}

}  // namespace

PeerWatch::PeerWatch(std::int32_t rank, std::int32_t num_ranks, std::int64_t peer_timeout_ms,
                     std::int64_t now_ns)
    : rank_(rank),
      peer_timeout_ms_(peer_timeout_ms),
      peers_(num_ranks),
      last_check_ns_(now_ns),
      resumed_ns_(now_ns) {
  for (Peer& peer : peers_) peer.heard_ns = now_ns;
}

void PeerWatch::heard(std::int32_t peer, const RankState& state, std::int64_t now_ns,
                      std::vector<Decision> decisions) {
  std::lock_guard lock(mutex_);
  Peer& entry = peers_.at(peer);
  entry.state = state;
  entry.decisions = std::move(decisions);
  entry.heard_ns = now_ns;
  entry.has_spoken = true;
}

void PeerWatch::said_bye(std::int32_t peer) {
  std::lock_guard lock(mutex_);
  peers_.at(peer).has_left = true;
}

bool PeerWatch::has_left(std::int32_t peer) const {
  std::lock_guard lock(mutex_);
  return peers_.at(peer).has_left;
}

std::optional<Status> PeerWatch::check(const RankState& self, std::int64_t stall_timeout_ms,
                                       std::int64_t now_ns) {
  std::lock_guard lock(mutex_);
  forgive_pause(now_ns);
  const auto num_ranks = static_cast<std::int32_t>(peers_.size());
  for (std::int32_t peer = 0; peer < num_ranks; ++peer) {
    const Peer& entry = peers_[peer];
    if (peer == rank_ || entry.has_left || silent_ms(entry, now_ns) < peer_timeout_ms_) continue;
    return Status{StatusCode::kPeerLost, peer,
                  rank_text(rank_) + " lost rank " + std::to_string(peer) + ", which " +
                      peer_text(peer, now_ns) + "; the most it may be silent is " +
                      seconds_text(peer_timeout_ms_) +
                      ". Its connection is still open: the process is frozen or its host is out "
                      "of reach. This step cannot resume; restart from the last checkpoint"};
  }
  if (is_stalled(self, stall_timeout_ms, now_ns)) return stall_status(self, now_ns);
  return std::nullopt;
}

// Peers could have spoken while this process was stopped, and what it waited for could have
// been on its way.
void PeerWatch::forgive_pause(std::int64_t now_ns) {
  const std::int64_t passed_ns = now_ns - last_check_ns_;
  last_check_ns_ = now_ns;
  if (passed_ns < kPauseMs * kNsPerMs) return;
  resumed_ns_ = now_ns;
  for (Peer& peer : peers_) peer.heard_ns = std::min(now_ns, peer.heard_ns + passed_ns);
}

std::int64_t PeerWatch::silent_ms(const Peer& peer, std::int64_t now_ns) const {
  return std::max<std::int64_t>(0, now_ns - peer.heard_ns) / kNsPerMs;
}

bool PeerWatch::is_stalled(const RankState& self, std::int64_t stall_timeout_ms,
                           std::int64_t now_ns) const {
  const std::int64_t awake_ms = (now_ns - resumed_ns_) / kNsPerMs;
  if (self.activity != Activity::kWaiting && self.activity != Activity::kTying) return false;
  if (std::min(self.since_ms, awake_ms) < stall_timeout_ms) return false;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    const Peer& entry = peers_[peer];
    if (static_cast<std::int32_t>(peer) == rank_ || entry.has_left || !entry.has_spoken) continue;
    if (entry.state.activity == Activity::kRunning) return false;
    if (entry.state.since_ms + silent_ms(entry, now_ns) < stall_timeout_ms) return false;
  }
  return true;
}

Status PeerWatch::stall_status(const RankState& self, std::int64_t now_ns) const {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    const Peer& entry = peers_[peer];
    if (static_cast<std::int32_t>(peer) == rank_ || entry.has_left) continue;
    if (!is_before(entry.state, self.step)) continue;
    return {StatusCode::kTimedOut, static_cast<std::int32_t>(peer),
            "rank " + std::to_string(peer) + " did not enter step " + std::to_string(self.step) +
                ", which rank " + std::to_string(rank_) + " has waited in for " +
                seconds_text(self.since_ms) + ". " + all_text(self, now_ns) +
                " See why rank " + std::to_string(peer) + " is late"};
  }
  return {StatusCode::kStalled, rank_,
          "nothing could run on any rank for " + seconds_text(self.since_ms) + ". " +
              all_text(self, now_ns) + " Look at rank " + std::to_string(first_suspect(self)) +
              " first"};
}

// Follows who waits for whom, to a rank that waits for nobody or closes a circle.
std::int32_t PeerWatch::first_suspect(const RankState& self) const {
  std::vector<bool> is_seen(peers_.size(), false);
  std::int32_t suspect = rank_;
  while (!is_seen[suspect]) {
    is_seen[suspect] = true;
    const RankState& state = suspect == rank_ ? self : peers_[suspect].state;
    const bool has_word = state.activity == Activity::kTying ||
                          (state.activity == Activity::kWaiting && state.source_stage >= 0);
    const bool waits_for_rank = has_word && state.source_rank >= 0 &&
                                state.source_rank < static_cast<std::int32_t>(peers_.size());
    if (!waits_for_rank) break;
    suspect = state.source_rank;
  }
  return suspect;
}

std::string PeerWatch::peer_text(std::int32_t peer, std::int64_t now_ns) const {
  const Peer& entry = peers_[peer];
  if (entry.has_left) return "has closed its pipeline";
  const std::string ago = seconds_text(silent_ms(entry, now_ns)) + " ago";
  if (!entry.has_spoken) return "was never heard since this rank began " + ago;
  return to_text(entry.state) + ", as last heard " + ago;
}

std::string PeerWatch::all_text(const RankState& self, std::int64_t now_ns) const {
  std::string text = "Rank " + std::to_string(rank_) + " (which says this) " + to_text(self) + ".";
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (static_cast<std::int32_t>(peer) == rank_) continue;
    text += "\nRank " + std::to_string(peer) + " " +
            peer_text(static_cast<std::int32_t>(peer), now_ns) + ".";
  }
  return text + "\n";
}

std::string PeerWatch::last_words(std::int32_t peer, std::int64_t now_ns) const {
  std::lock_guard lock(mutex_);
  return peer_text(peer, now_ns);
}

std::string PeerWatch::describe(const RankState& self, std::int64_t now_ns) const {
  std::lock_guard lock(mutex_);
  return all_text(self, now_ns);
}

std::vector<RankView> PeerWatch::views(RankView own, std::int64_t now_ns) const {
  std::lock_guard lock(mutex_);
  std::vector<RankView> views;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (static_cast<std::int32_t>(rank) == rank_) {
      views.push_back(std::move(own));
      continue;
    }
    const Peer& peer = peers_[rank];
    views.push_back({.rank = static_cast<std::int32_t>(rank),
                     .has_spoken = peer.has_spoken,
                     .has_left = peer.has_left,
                     .heard_ago_ms = silent_ms(peer, now_ns),
                     .state = peer.state,
                     .decisions = peer.decisions});
  }
  return views;
}

}  // namespace rrfp
