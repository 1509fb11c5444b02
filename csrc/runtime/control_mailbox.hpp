// ControlMailbox: blobs that came from each peer and were not yet asked for, in order.
// Threads  any; a mutex, because only the start and the end of a step come here.
// Bound    a few blobs per peer: it waits for an answer before it sends more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace rrfp {

class ControlMailbox {
 public:
  explicit ControlMailbox(std::int32_t num_ranks) : blobs_(num_ranks) {}

  void put(std::int32_t peer, std::vector<std::byte> blob) {
    std::lock_guard lock(mutex_);
    blobs_.at(peer).push_back(std::move(blob));
  }

  std::optional<std::vector<std::byte>> take(std::int32_t peer) {
    std::lock_guard lock(mutex_);
    auto& waiting = blobs_.at(peer);
    if (waiting.empty()) return std::nullopt;
    std::vector<std::byte> blob = std::move(waiting.front());
    waiting.pop_front();
    return blob;
  }

 private:
  std::mutex mutex_;
  std::vector<std::deque<std::vector<std::byte>>> blobs_;  // by peer
};

}  // namespace rrfp
