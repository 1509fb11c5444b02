#include "runtime/status_body.hpp"

#include <algorithm>
#include <cstring>

#include "comm/message.hpp"

namespace rrfp {

namespace {

// Little-endian on the wire, exactly as here; the text follows.
struct StatusPrefix {
  std::uint32_t code = 0;
  std::int32_t origin_rank = -1;
};

constexpr std::size_t kMaxTextBytes = kMaxMetadataBytes - sizeof(StatusPrefix);

}  // namespace

std::vector<std::byte> to_bytes(const Status& status) {
  const StatusPrefix prefix{static_cast<std::uint32_t>(status.code), status.origin_rank};
  const std::size_t text_bytes = std::min(status.message.size(), kMaxTextBytes);
  std::vector<std::byte> body(sizeof prefix + text_bytes);
  std::memcpy(body.data(), &prefix, sizeof prefix);
  std::memcpy(body.data() + sizeof prefix, status.message.data(), text_bytes);
  return body;
}

std::optional<Status> parse_status(std::span<const std::byte> body) {
  StatusPrefix prefix;
  if (body.size() < sizeof prefix) return std::nullopt;
  std::memcpy(&prefix, body.data(), sizeof prefix);
  if (prefix.code == 0 || prefix.code > static_cast<std::uint32_t>(StatusCode::kDeviceFailed)) {
    return std::nullopt;
  }
  const auto text = body.subspan(sizeof prefix);
  return Status{static_cast<StatusCode>(prefix.code), prefix.origin_rank,
                std::string(reinterpret_cast<const char*>(text.data()), text.size())};
}

}  // namespace rrfp
