// Time as the engine sees it: nanoseconds of a monotonic clock. The engine never reads a
// clock itself; callers pass now_ns, so that a simulator can pass its own.
#pragma once

#include <chrono>
#include <cstdint>

namespace rrfp {

inline constexpr std::int64_t kNsPerUs = 1000;
inline constexpr std::int64_t kNsPerMs = 1000 * kNsPerUs;

inline std::int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A clock as an option: of a runtime that is driven by hand, a virtual one.
using ReadClock = std::int64_t (*)();

}  // namespace rrfp
