// StepMeeting: how the ranks meet before a step and after it, as a process session does: a word of
// every rank to rank 0, then its answer to all.
#pragma once

#include <cstdint>

#include "runtime/rank_runtime.hpp"
#include "sim_network.hpp"

namespace rrfp::test {

enum class Met : std::uint8_t { kYes, kNotYet, kTooLate };

class StepMeeting {
 public:
  void start(RankRuntime& runtime, std::int64_t deadline_ns) {
    deadline_ns_ = deadline_ns;
    awaited_ = runtime.rank() == 0 ? 1 : 0;
    if (runtime.rank() != 0) runtime.send_control(0, {std::byte{1}});
  }

  Met look(RankRuntime& runtime) {
    const Met missing = virtual_ns() < deadline_ns_ ? Met::kNotYet : Met::kTooLate;
    if (runtime.rank() != 0) return runtime.recv_control(0, 0) ? Met::kYes : missing;
    for (; awaited_ < runtime.num_ranks(); ++awaited_) {
      if (!runtime.recv_control(awaited_, 0)) return missing;
    }
    for (std::int32_t peer = 1; peer < runtime.num_ranks(); ++peer) {
      runtime.send_control(peer, {std::byte{2}});
    }
    return Met::kYes;
  }

  std::int32_t awaited() const { return awaited_; }  // whose word is missing

 private:
  std::int64_t deadline_ns_ = 0;
  std::int32_t awaited_ = 0;
};

}  // namespace rrfp::test
