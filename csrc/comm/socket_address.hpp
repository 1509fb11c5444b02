// "unix:<name>" as the kernel wants it: a name in the abstract namespace.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <optional>
#include <string_view>

namespace rrfp {

inline constexpr std::string_view kUnixPrefix = "unix:";

struct UnixAddress {
  sockaddr_un name{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

// nullopt when it is not of that form, or too long.
inline std::optional<UnixAddress> parse_unix_address(std::string_view address) {
  if (address.substr(0, kUnixPrefix.size()) != kUnixPrefix) return std::nullopt;
  address.remove_prefix(kUnixPrefix.size());
  UnixAddress result;
  // An abstract name begins with a zero byte and ends with its length.
  if (address.empty() || address.size() + 1 > sizeof result.name.sun_path) return std::nullopt;
  result.name.sun_family = AF_UNIX;
  std::memcpy(result.name.sun_path + 1, address.data(), address.size());
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
  return result;
}

}  // namespace rrfp
