// Fault: the one thing that goes wrong in a simulated run, drawn from its seed.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>

#include "comm/message.hpp"

namespace rrfp::test {

enum class FaultKind : std::uint8_t {
  kNone,
  kAgain,        // a message is sent twice; the second may come in a later step
  kCorrupt,      // one bit of a header changes on its way
  kForeign,      // a header of another run, version, step or sender
  kTruncated,    // a connection ends inside a message
  kStops,        // a rank is stopped, and goes on when all others have ended
  kDies,         // a rank's process is gone
  kNeverStarts,  // a rank does not enter a step
  kTaskFails,
};
inline constexpr std::array kFaultNames = {"no fault", "again",   "corrupt",      "foreign",
                                           "truncated", "stops",  "dies",         "never starts",
                                           "task fails"};
inline const char* name_of(FaultKind kind) { return kFaultNames[static_cast<std::size_t>(kind)]; }
inline bool is_of_a_message(FaultKind kind) {
  return kind >= FaultKind::kAgain && kind <= FaultKind::kTruncated;
}

struct Fault {
  FaultKind kind = FaultKind::kNone;
  std::int32_t rank = 0;      // where it strikes: of a message, its sender
  std::int32_t nth = 0;       // the message or task of the rank that it strikes, from 0
  std::uint32_t step = 0;     // kNeverStarts
  std::uint32_t detail = 0;   // which bit, which foreign header, how late
  std::int64_t late_ns = 0;   // kAgain

  Fault() = default;
  Fault(std::uint64_t seed, std::int32_t num_ranks, std::int32_t num_tasks_per_step,
        std::uint32_t num_steps) {
    std::mt19937_64 random(seed ^ 0x5eed5eed5eedULL);
    const auto draw = [&](std::int64_t least, std::int64_t most) {
      return std::uniform_int_distribution<std::int64_t>(least, most)(random);
    };
    kind = static_cast<FaultKind>(draw(0, kFaultNames.size() - 1));
    if (num_ranks == 1 && kind != FaultKind::kTaskFails) kind = FaultKind::kNone;
    rank = static_cast<std::int32_t>(draw(0, num_ranks - 1));
    nth = static_cast<std::int32_t>(draw(0, std::int64_t{num_tasks_per_step} * num_steps - 1));
    step = static_cast<std::uint32_t>(draw(0, num_steps - 1));
    detail = static_cast<std::uint32_t>(draw(0, 1 << 20));
    late_ns = draw(0, 3) == 0 ? 0 : draw(0, 4000000);
  }

  std::string text() const {
    return std::string(name_of(kind)) + " at rank " + std::to_string(rank) + ", number " +
           std::to_string(nth) + ", step " + std::to_string(step) + ", detail " +
           std::to_string(detail);
  }
};

// What kCorrupt and kForeign make of a header.
inline void spoil_header(const Fault& fault, MessageHeader& header) {
  if (fault.kind == FaultKind::kCorrupt) {
    // The sizes are kTruncated's: they say how many bytes follow.
    std::array<unsigned char, 48> bytes{};
    std::memcpy(bytes.data(), &header, bytes.size());
    const std::uint32_t bit = fault.detail % (8 * bytes.size());
    bytes[bit / 8] = static_cast<unsigned char>(bytes[bit / 8] ^ (1u << bit % 8));
    std::memcpy(static_cast<void*>(&header), bytes.data(), bytes.size());
    return;
  }
  switch (fault.detail % 7) {
    case 0: ++header.run; return;
    case 1: ++header.version; return;
    case 2: header.step += 7; return;
    case 3: ++header.source_rank; return;
    case 4: header.source_stage = -1 - header.source_stage; return;
    case 5: header.microbatch += 1000000; return;
    default: header.target_stage = -7;
  }
}

}  // namespace rrfp::test
