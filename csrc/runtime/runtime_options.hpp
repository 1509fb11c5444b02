// RuntimeOptions: what a RankRuntime is told once, when it is made.
#pragma once

#include <cstdint>

#include "base/clock.hpp"

namespace rrfp {

struct RuntimeOptions {
  std::uint64_t run = 0;
  std::int64_t heartbeat_ms = 500;
  std::int64_t peer_timeout_ms = 60000;  // silence after which a peer counts as lost
  std::int64_t spin_us = 0;              // how long an idle worker looks before it sleeps
  // Between two looks it lets another thread run: where cores are scarce.
  bool spin_yields = false;
  // An idle worker calls the transport's progress() itself (worker_progress.hpp).
  bool worker_moves_messages = false;
  // Tasks that usually take less are not announced: they end about when the word of their start
  // could be acted on, and it would cost as much as their own message.
  std::int64_t least_announced_us = 500;
  ReadClock now_ns = steady_now_ns;
  bool is_driven = false;  // no progress thread: the owner calls progress() and tick(), as tests do
};

}  // namespace rrfp
