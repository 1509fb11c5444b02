// PeerWatch: what each peer was last heard to do. Tells a peer that is gone or frozen (silent)
// from one that is busy (inside a long task), and a pipeline in which nothing can run any more
// (stalled) from both.
//
// Silent   nothing heard from a peer for peer_timeout_ms: kPeerLost.
// Stalled  this rank has waited inside a step (or after its tasks, for tied gradients) for
//          stall_timeout_ms, and no peer is inside a task
//          or has changed what it does within that time: kStalled, or kTimedOut when a peer has
//          not entered the step at all.
// Pause    when check() itself comes more than kPauseMs late, this process was stopped; the
//          time it did not see counts for nobody.
// Threads  any, for everything; a mutex, because only heartbeats and ticks come here.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "runtime/rank_state.hpp"

namespace rrfp {

// What is known of a rank, for reports.
struct RankView {
  std::int32_t rank = -1;
  bool is_own = false;
  bool has_spoken = false;       // of a peer
  bool has_left = false;         // of a peer: it has closed its pipeline
  std::int64_t heard_ago_ms = 0; // of a peer: the state and the decisions are that old
  RankState state;
  std::vector<Decision> decisions;
};

class PeerWatch {
 public:
  static constexpr std::int64_t kPauseMs = 2000;

  PeerWatch(std::int32_t rank, std::int32_t num_ranks, std::int64_t peer_timeout_ms,
            std::int64_t now_ns);

  void heard(std::int32_t peer, const RankState& state, std::int64_t now_ns,
             std::vector<Decision> decisions = {});
  void said_bye(std::int32_t peer);
  bool has_left(std::int32_t peer) const;  // said goodbye: its silence is no loss

  // Once a tick. `self`: this rank; stall_timeout_ms counts while it waits inside a step.
  std::optional<Status> check(const RankState& self, std::int64_t stall_timeout_ms,
                              std::int64_t now_ns);

  // "was last heard 12.3 s ago, when it was inside 2F3, ...".
  std::string last_words(std::int32_t peer, std::int64_t now_ns) const;
  // A line per rank, this one first.
  std::string describe(const RankState& self, std::int64_t now_ns) const;
  std::vector<RankView> views(RankView own, std::int64_t now_ns) const;  // by rank

 private:
  struct Peer {
    RankState state;
    std::vector<Decision> decisions;
    std::int64_t heard_ns = 0;
    bool has_spoken = false;
    bool has_left = false;
  };

  void forgive_pause(std::int64_t now_ns);
  std::int64_t silent_ms(const Peer& peer, std::int64_t now_ns) const;
  bool is_stalled(const RankState& self, std::int64_t stall_timeout_ms,
                  std::int64_t now_ns) const;
  Status stall_status(const RankState& self, std::int64_t now_ns) const;
  std::int32_t first_suspect(const RankState& self) const;
  std::string peer_text(std::int32_t peer, std::int64_t now_ns) const;
  std::string all_text(const RankState& self, std::int64_t now_ns) const;

  const std::int32_t rank_;
  const std::int64_t peer_timeout_ms_;
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;         // by rank; this rank's own is unused
  std::int64_t last_check_ns_;
  std::int64_t resumed_ns_;         // the start, or the end of the last pause
};

}  // namespace rrfp
