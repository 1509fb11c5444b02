#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include "comm/socket_address.hpp"
#include "comm/socket_transport.hpp"

namespace rrfp {

namespace {

constexpr int kBacklog = 512;

// Not to be guessed, though a stranger who knows it could do nothing without the run token.
std::string new_address() {
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

}  // namespace

SocketListener::SocketListener()
    : socket_(Descriptor::open([] {
        return ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      })),
      address_(new_address()) {
  const auto where = parse_unix_address(address_);
  if (!socket_ || ::bind(socket_.get(), where->get(), where->length) != 0 ||
      ::listen(socket_.get(), kBacklog) != 0) {
    throw std::system_error(errno, std::generic_category(), "rrfp: listening at " + address_);
  }
}

}  // namespace rrfp
