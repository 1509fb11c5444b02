#include "comm/socket_interface.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/check.hpp"
#include "comm/fork_guard.hpp"
#include "comm/socket_address.hpp"

namespace rrfp {

namespace {

struct HostAddress {
  std::string interface;
  std::string host;
  bool is_loopback = false;
};

// An address that means something on its own link alone, where a scope would have to go with it.
bool needs_scope(const sockaddr* address) {
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// Of interfaces that are up, IPv4 first.
std::vector<HostAddress> host_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::vector<HostAddress> result;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family) continue;
      if (!(each->ifa_flags & IFF_UP) || needs_scope(each->ifa_addr)) continue;
      result.push_back({each->ifa_name, host_text(each->ifa_addr),
                        (each->ifa_flags & IFF_LOOPBACK) != 0});
    }
  }
  return result;
}

std::string list_of(const std::vector<HostAddress>& addresses) {
  std::string text;
  for (const HostAddress& each : addresses) {
    text += (text.empty() ? "" : ", ") + each.interface + " " + each.host;
  }
  return text.empty() ? "none" : text;
}

// The source address of the route to it; a datagram socket that sends nothing finds out.
std::optional<std::string> route_to(const std::string& master) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (master.empty() || ::getaddrinfo(master.c_str(), "9", &wanted, &found) != 0) {
    return std::nullopt;
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    const Descriptor socket = Descriptor::open([each] {
      return ::socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    });
    if (!socket || ::connect(socket.get(), each->ai_addr, each->ai_addrlen) != 0) continue;
    sockaddr_storage source{};
    socklen_t length = sizeof source;
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&source), &length) == 0) {
      return host_text(reinterpret_cast<const sockaddr*>(&source));
    }
  }
  return std::nullopt;
}

bool is_loopback(std::string_view host) {
  return host.substr(0, 4) == "127." || host == "::1" || host == "localhost";
}

}  // namespace

std::string choose_host(const std::string& master, const std::string& interfaces) {
  const std::vector<HostAddress> addresses = host_addresses();
  if (!interfaces.empty()) {
    std::string_view rest = interfaces;
    while (true) {
      const std::size_t comma = rest.find(',');
      const std::string_view wanted = rest.substr(0, comma);
      for (const HostAddress& each : addresses) {
        if (!wanted.empty() && each.interface.starts_with(wanted)) return each.host;
      }
      RRFP_CHECK(comma != std::string_view::npos,
                 "no network interface matches \"" + interfaces + "\" (RRFP_SOCKET_IFNAME); this "
                 "host has " + list_of(addresses) + ". Set it to one of these, or unset it.");
      rest.remove_prefix(comma + 1);
    }
  }
  const std::optional<std::string> route = route_to(master);
  if (route && (!is_loopback(*route) || is_loopback(master))) return *route;
  for (const HostAddress& each : addresses) {
    if (!each.is_loopback) return each.host;
  }
  if (route) return *route;
  return addresses.empty() ? "" : addresses.front().host;
}

}  // namespace rrfp
