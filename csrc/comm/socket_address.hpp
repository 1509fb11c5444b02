// Where a rank listens, as a text that travels: "unix:<name>", a name in the abstract namespace, or
// "tcp:<host>:<port>" with a numeric host, an IPv6 one in brackets. What a listener publishes is
// one of them, or both with a comma between, to be tried in that order.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace rrfp {

inline constexpr std::string_view kUnixPrefix = "unix:";
inline constexpr std::string_view kTcpPrefix = "tcp:";

struct SocketAddress {
  sockaddr_storage name{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
  int family() const { return name.ss_family; }
};

// nullopt when it is not of either form, or too long.
std::optional<SocketAddress> parse_address(std::string_view address);

// The parts of a published address; empty when one of them is not to be parsed.
std::vector<SocketAddress> parse_addresses(std::string_view published);

// The numeric host; nullopt when it is none. port may be 0.
std::optional<SocketAddress> make_tcp_address(const std::string& host, std::uint16_t port);

bool is_unix_socket(int fd);

// A header must not wait for the acknowledgement of the message before it.
void send_at_once(int fd);

// The inverse of parse_address() for TCP.
std::string tcp_text(const SocketAddress& address);

// The numeric host of an IPv4 or IPv6 address, with its scope where it has one.
std::string host_text(const sockaddr* address);

}  // namespace rrfp
