#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include "base/check.hpp"
#include "comm/socket_address.hpp"
#include "comm/socket_transport.hpp"

namespace rrfp {

namespace {

constexpr int kBacklog = 512;

// Not to be guessed, though a stranger who knows it could do nothing without the run token.
std::string new_unix_address() {
  std::array<unsigned char, 16> random{};
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    throw std::system_error(errno, std::generic_category(), "rrfp: getrandom");
  }
  std::string address = std::string(kUnixPrefix) + "rrfp-" + std::to_string(getpid()) + "-";
  for (const unsigned char byte : random) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    address += digits;
  }
  return address;
}

Descriptor listen_at(const SocketAddress& where, const std::string& text) {
  Descriptor socket = Descriptor::open([&where] {
    return ::socket(where.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  if (!socket || ::bind(socket.get(), where.get(), where.length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    throw std::system_error(errno, std::generic_category(), "rrfp: listening at " + text);
  }
  return socket;
}

}  // namespace

SocketListener::SocketListener(const std::string& host, bool with_unix) {
  RRFP_CHECK(with_unix || !host.empty(), "a listener needs a host or a Unix socket");
  if (with_unix) {
    address_ = new_unix_address();
    sockets_.push_back(listen_at(*parse_address(address_), address_));
  }
  if (host.empty()) return;
  const auto wanted = make_tcp_address(host, 0);
  RRFP_CHECK(wanted.has_value(), "\"" + host + "\" is no numeric address of a host");
  sockets_.push_back(listen_at(*wanted, host));
  SocketAddress bound;
  bound.length = sizeof bound.name;
  if (getsockname(sockets_.back().get(), reinterpret_cast<sockaddr*>(&bound.name),
                  &bound.length) != 0) {
    throw std::system_error(errno, std::generic_category(), "rrfp: getsockname");
  }
  address_ += (address_.empty() ? "" : ",") + tcp_text(bound);
}

}  // namespace rrfp
