// A Status as the body of an abort message.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/status.hpp"

namespace rrfp {

// A text too long for a message is cut at the end.
std::vector<std::byte> to_bytes(const Status& status);
std::optional<Status> parse_status(std::span<const std::byte> body);  // nullopt: malformed

}  // namespace rrfp
