#include "runtime/peer_clocks.hpp"

#include <algorithm>
#include <cstring>

#include "base/clock.hpp"

namespace rrfp {

namespace {
constexpr std::int64_t kNotKnown = INT64_MIN;
constexpr std::int64_t kLatestNs = INT64_MAX / 4;  // so that no sum below can overflow

bool is_moment(std::int64_t ns) { return ns >= 0 && ns <= kLatestNs; }
}  // namespace

void write_echo(const ClockEcho& echo, std::span<std::byte> to) {
  std::memcpy(to.data(), &echo, sizeof echo);
}

std::optional<ClockEcho> parse_echo(std::span<const std::byte> body) {
  ClockEcho echo;
  if (body.size() < sizeof echo) return std::nullopt;
  std::memcpy(&echo, body.data(), sizeof echo);
  if (!is_moment(echo.sent_ns) || !is_moment(echo.echoed_sent_ns) ||
      echo.echoed_heard_ns < 0 || echo.echoed_heard_ns > echo.sent_ns) {
    return std::nullopt;
  }
  return echo;
}

PeerClocks::PeerClocks(std::int32_t num_ranks, bool is_one_clock)
    : is_one_clock_(is_one_clock), peers_(static_cast<std::size_t>(num_ranks)) {
  for (Peer& peer : peers_) {
    peer.offset_ns.store(is_one_clock ? 0 : kNotKnown, std::memory_order_relaxed);  // one word
  }
}

ClockEcho PeerClocks::echo_to(std::int32_t peer, std::int64_t now_ns) {
  std::lock_guard lock(mutex_);
  Peer& entry = peers_.at(peer);
  if (!entry.is_echoed && entry.prompt_echoes > 0) --entry.prompt_echoes;
  entry.is_echoed = true;
  return {now_ns, entry.sent_ns, entry.heard_ns};
}

bool PeerClocks::owes(std::int32_t peer) const {
  std::lock_guard lock(mutex_);
  const Peer& entry = peers_.at(peer);
  return !is_one_clock_ && !entry.is_echoed && entry.prompt_echoes > 0;
}

void PeerClocks::heard(std::int32_t peer, const ClockEcho& echo, std::int64_t now_ns) {
  std::lock_guard lock(mutex_);
  Peer& entry = peers_.at(peer);
  entry.sent_ns = echo.sent_ns;
  entry.heard_ns = now_ns;
  entry.is_echoed = false;
  if (is_one_clock_ || echo.echoed_sent_ns == 0) return;
  const std::int64_t at_peer_ns = echo.sent_ns - echo.echoed_heard_ns;
  const std::int64_t round_trip_ns = now_ns - echo.echoed_sent_ns - at_peer_ns;
  if (round_trip_ns < 0) return;  // no four times of a real exchange
  const std::int64_t drifted_ns = (now_ns - entry.measured_ns) / kDriftsOneIn;
  if (entry.round_trip_ns >= 0 && round_trip_ns > entry.round_trip_ns + drifted_ns) return;
  entry.measured_ns = now_ns;
  entry.round_trip_ns = round_trip_ns;
  const std::int64_t offset_ns = (echo.echoed_heard_ns - echo.echoed_sent_ns) / 2 +
                                 (echo.sent_ns - now_ns) / 2;
  entry.offset_ns.store(offset_ns, std::memory_order_relaxed);  // one word
}

std::int64_t PeerClocks::to_own_ns(std::int32_t peer, std::uint32_t short_us,
                                   std::int64_t now_ns) const {
  const auto index = static_cast<std::size_t>(peer);
  if (short_us == 0 || index >= peers_.size()) return 0;
  // relaxed: one word.
  const std::int64_t offset_ns = peers_[index].offset_ns.load(std::memory_order_relaxed);
  if (offset_ns == kNotKnown) return 0;
  const std::int64_t at_ns = from_short_us(short_us, now_ns + offset_ns) - offset_ns;
  return std::max<std::int64_t>(1, std::min(at_ns, now_ns));
}

}  // namespace rrfp
