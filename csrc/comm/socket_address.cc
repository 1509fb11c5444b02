#include "comm/socket_address.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>

#include <charconv>
#include <cstddef>
#include <cstring>

namespace rrfp {

namespace {

std::optional<SocketAddress> parse_unix(std::string_view name) {
  SocketAddress result;
  sockaddr_un where{};
  // An abstract name begins with a zero byte and ends with its length.
  if (name.empty() || name.size() + 1 > sizeof where.sun_path) return std::nullopt;
  where.sun_family = AF_UNIX;
  std::memcpy(where.sun_path + 1, name.data(), name.size());
  std::memcpy(&result.name, &where, sizeof where);
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

std::optional<SocketAddress> parse_tcp(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc{} || end != digits.data() + digits.size() || port == 0) {
    return std::nullopt;
  }
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return std::nullopt;
    host = host.substr(1, host.size() - 2);
  }
  return make_tcp_address(std::string(host), port);
}

}  // namespace

std::optional<SocketAddress> parse_address(std::string_view address) {
  if (address.substr(0, kUnixPrefix.size()) == kUnixPrefix) {
    return parse_unix(address.substr(kUnixPrefix.size()));
  }
  if (address.substr(0, kTcpPrefix.size()) == kTcpPrefix) {
    return parse_tcp(address.substr(kTcpPrefix.size()));
  }
  return std::nullopt;
}

std::vector<SocketAddress> parse_addresses(std::string_view published) {
  std::vector<SocketAddress> result;
  while (true) {
    const std::size_t comma = published.find(',');
    const auto one = parse_address(published.substr(0, comma));
    if (!one) return {};
    result.push_back(*one);
    if (comma == std::string_view::npos) return result;
    published.remove_prefix(comma + 1);
  }
}

std::optional<SocketAddress> make_tcp_address(const std::string& host, std::uint16_t port) {
  addrinfo wanted{};
  wanted.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found) != 0) {
    return std::nullopt;
  }
  SocketAddress result;
  std::memcpy(&result.name, found->ai_addr, found->ai_addrlen);
  result.length = found->ai_addrlen;
  ::freeaddrinfo(found);
  return result;
}

bool is_unix_socket(int fd) {
  int domain = AF_UNIX;
  socklen_t length = sizeof domain;
  (void)getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length);
  return domain == AF_UNIX;
}

void send_at_once(int fd) {
  const int on = 1;
  if (!is_unix_socket(fd)) (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::string host_text(const sockaddr* address) {
  char host[NI_MAXHOST] = "?";
  const socklen_t length = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6)
                                                          : sizeof(sockaddr_in);
  (void)::getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

std::string tcp_text(const SocketAddress& address) {
  const std::string host = host_text(address.get());
  const bool is_v6 = address.family() == AF_INET6;
  const in_port_t port = is_v6 ? reinterpret_cast<const sockaddr_in6*>(&address.name)->sin6_port
                               : reinterpret_cast<const sockaddr_in*>(&address.name)->sin_port;
  return std::string(kTcpPrefix) + (is_v6 ? "[" + host + "]" : host) + ":" +
         std::to_string(ntohs(port));
}

}  // namespace rrfp
