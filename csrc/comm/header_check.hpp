// The one place that judges an incoming header. Nothing of a header is used before it passed.
#pragma once

#include <cstdint>
#include <string>

#include "comm/message.hpp"

namespace rrfp {

// What the next header on an established connection must say.
struct ExpectedHeader {
  std::uint64_t run = 0;
  std::int32_t source_rank = -1;
  std::uint32_t sequence = 0;
};

// Empty when all is well, else what is wrong: the field, what was expected, what came.
std::string header_defect(const MessageHeader& header, const ExpectedHeader& expected);

}  // namespace rrfp
