// TaskTimes: what a rank's tasks usually take, and how long the messages that its tasks wait for
// usually travel: means that forget, by kind and chunk, learnt over steps; and how much tasks
// vary. They bound how long the arbiter waits for a task that the hint puts first.
//
// Threads  the rank's worker only.
// Bound    fixed at construction.
// Lifetime outlives the steps that learn from it and use it.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "base/prefetch.hpp"
#include "base/task.hpp"

namespace rrfp {

class TaskTimes {
 public:
  explicit TaskTimes(std::int32_t num_chunks,
                     std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : num_chunks_(num_chunks),
        means_(static_cast<std::size_t>(num_chunks) * kNumTaskKinds, memory) {}

  std::int32_t num_chunks() const { return num_chunks_; }
  void prefetch(TaskKind kind) const { rrfp::prefetch(&at(kind, 0)); }

  void add_duration(TaskKind kind, std::int32_t chunk, std::int64_t duration_ns) {
    at(kind, chunk).duration_ns.add(duration_ns);
  }
  // From the announcement's arrival plus what the sender's task then took, to the arrival of its
  // output: no clock of another rank is in it. Below zero where announcements travel longer.
  void add_travel(TaskKind kind, std::int32_t chunk, std::int64_t travel_ns) {
    at(kind, chunk).travel_ns.add(travel_ns);
  }

  // 0: nothing learnt yet.
  std::int64_t duration_ns(TaskKind kind, std::int32_t chunk) const {
    return static_cast<std::int64_t>(at(kind, chunk).duration_ns.value);
  }
  std::int64_t travel_ns(TaskKind kind, std::int32_t chunk) const {
    return static_cast<std::int64_t>(at(kind, chunk).travel_ns.value);
  }
  // How far a duration usually is from the mean, as a share of the mean.
  double variation(TaskKind kind, std::int32_t chunk) const {
    const Mean& mean = at(kind, chunk).duration_ns;
    return mean.value > 0 ? mean.deviation / mean.value : 0;
  }

 private:
  struct Mean {
    static constexpr double kWeight = 0.2;  // of the latest value
    double value = 0;
    double deviation = 0;  // of the values from the mean before them, without sign
    bool is_known = false;
    void add(std::int64_t latest) {
      if (is_known) {
        deviation += kWeight * (std::abs(static_cast<double>(latest) - value) - deviation);
      }
      value = is_known ? value + kWeight * (static_cast<double>(latest) - value)
                       : static_cast<double>(latest);
      is_known = true;
    }
  };
  struct Means {
    Mean duration_ns;
    Mean travel_ns;
  };

  Means& at(TaskKind kind, std::int32_t chunk) {
    return means_[static_cast<std::size_t>(kind) * num_chunks_ + chunk];
  }
  const Means& at(TaskKind kind, std::int32_t chunk) const {
    return means_[static_cast<std::size_t>(kind) * num_chunks_ + chunk];
  }

  std::int32_t num_chunks_;
  std::pmr::vector<Means> means_;
};

}  // namespace rrfp
