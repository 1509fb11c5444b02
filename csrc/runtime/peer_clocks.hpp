// PeerClocks: what this rank's clock said when a peer's clock said something else. The monotonic
// clocks of two hosts have no common zero, so each heartbeat carries when it was sent and, of the
// last one that came the other way, when that was sent and when it came. From four such times
// follows the offset of the two clocks, within half the round trip that was not spent waiting at
// the peer: the exchange of NTP (RFC 5905, section 8).
//
// Kept     of each peer the sample of the smallest round trip. Clocks drift, so an old one counts
//          as if its round trip had been longer, by kDriftsOneIn of its age (the dispersion of
//          RFC 5905, section 10).
// Start    The first sample may be poor: a peer that was still being set up read its heartbeat
//          late. So the first kPromptEchoes heartbeats of a peer are answered at once (owes());
//          later ones are echoed by the regular heartbeats.
// Threads  heard(), echo_to(), owes(): any, a mutex among them. to_own_ns(): any, wait-free.
// Bound    Of a constant size for each peer.
// Edges    none: an offset is one word, and orders nothing (relaxed).
// Checked  tests/cpp/unit/peer_clocks_test.cc, rank_peer_test.cc, sim/runtime_sim.cc.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace rrfp {

// In a heartbeat, behind the RankState. Little-endian on the wire, exactly as here.
struct ClockEcho {
  std::int64_t sent_ns = 0;           // this heartbeat; the sender's clock
  std::int64_t echoed_sent_ns = 0;    // the receiver's last one, by the receiver's clock; 0: none
  std::int64_t echoed_heard_ns = 0;   // when it came, by the sender's
};
static_assert(sizeof(ClockEcho) == 24);

void write_echo(const ClockEcho& echo, std::span<std::byte> to);
std::optional<ClockEcho> parse_echo(std::span<const std::byte> body);  // nullopt: malformed

class PeerClocks {
 public:
  static constexpr std::int32_t kPromptEchoes = 4;
  static constexpr std::int64_t kDriftsOneIn = 5000;  // two clocks, 100 ppm each

  // `is_one_clock`: the ranks are one process. Nothing is measured then.
  PeerClocks(std::int32_t num_ranks, bool is_one_clock);

  // For the next heartbeat to the peer.
  ClockEcho echo_to(std::int32_t peer, std::int64_t now_ns);
  void heard(std::int32_t peer, const ClockEcho& echo, std::int64_t now_ns);
  // Whether the peer should not have to wait for the next regular heartbeat.
  bool owes(std::int32_t peer) const;

  // When the peer's clock said `short_us` (base/clock.hpp), in the last half hour; never after
  // now_ns. 0: not known.
  std::int64_t to_own_ns(std::int32_t peer, std::uint32_t short_us, std::int64_t now_ns) const;

 private:
  struct Peer {
    std::int64_t sent_ns = 0;          // of its last heartbeat, by its clock; 0: none came
    std::int64_t heard_ns = 0;
    std::int32_t prompt_echoes = kPromptEchoes;  // that it may still be owed
    bool is_echoed = true;
    std::int64_t measured_ns = 0;      // when the sample that is kept was taken
    std::int64_t round_trip_ns = -1;   // of that sample; -1: none
    std::atomic<std::int64_t> offset_ns;  // the peer's clock less this rank's; kNotKnown
  };

  const bool is_one_clock_;
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;  // by rank
};

}  // namespace rrfp
