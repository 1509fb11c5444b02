// A full mesh of sockets inside one process, set up the way processes do it.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "comm/socket_transport.hpp"

namespace rrfp::test {

inline RunToken test_token() {
  RunToken token;
  token.fill(std::byte{0x5a});
  return token;
}

inline SocketSetup socket_setup(std::int32_t rank, std::vector<std::string> addresses) {
  SocketSetup setup;
  setup.rank = rank;
  setup.addresses = std::move(addresses);
  setup.token = test_token();
  setup.run = 99;
  setup.timeout_ms = 20000;
  return setup;
}

// Through listeners at `host`, over TCP alone; empty: as on one host.
inline std::vector<std::unique_ptr<Transport>> make_transports_at(const std::string& host,
                                                                  std::int32_t num_ranks) {
  const auto count = static_cast<std::size_t>(num_ranks);
  std::vector<SocketListener> listeners;
  while (listeners.size() < count) listeners.emplace_back(host, host.empty());
  std::vector<std::string> addresses;
  for (const SocketListener& listener : listeners) addresses.push_back(listener.address());
  std::vector<std::unique_ptr<Transport>> transports(count);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      Status status;
      transports[rank] = connect_sockets(
          listeners[rank], socket_setup(static_cast<std::int32_t>(rank), addresses), &status);
      if (!status.ok()) fail(__FILE__, __LINE__, status.message);
    });
  }
  for (auto& thread : threads) thread.join();
  return transports;
}

inline std::vector<std::unique_ptr<Transport>> make_socket_transports(std::int32_t num_ranks) {
  return make_transports_at("", num_ranks);
}

}  // namespace rrfp::test
