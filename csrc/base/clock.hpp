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

// A moment as a header has room for it: microseconds modulo 2^32, rounded up, so that it is never
// too early. 0 stands for a moment that is not known.
constexpr std::uint32_t to_short_us(std::int64_t at_ns) {
  const auto us = static_cast<std::uint32_t>((at_ns + 999) / 1000);
  return us == 0 ? 1 : us;
}

// The moment again, of the same clock, if it is less than 35 minutes from now_ns.
constexpr std::int64_t from_short_us(std::uint32_t short_us, std::int64_t now_ns) {
  const std::int64_t now_us = now_ns / 1000;
  const auto ago_us = static_cast<std::int32_t>(static_cast<std::uint32_t>(now_us) - short_us);
  return (now_us - ago_us) * 1000;
}

}  // namespace rrfp
