// SocketTransport: ranks that are processes. One connection to every peer carries headers,
// metadata, payload, heartbeats and the end; end-of-file without kBye is how a dead process
// is noticed. Unix sockets in the abstract namespace (nothing is left behind on any exit).
//
// Set-up   Each rank opens a SocketListener and publishes its address; connect_sockets() then
//          joins every pair (the higher rank connects to the lower), both sides proving with
//          the run token that they belong to this run. A connection that cannot is closed and
//          touches nothing else. The listener is closed when all peers are there.
// Threads  post_send(): any. progress(): the progress thread. connect_sockets(): the caller.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport.hpp"

namespace rrfp {

using RunToken = std::array<std::byte, 32>;

class SocketListener {
 public:
  SocketListener();   // throws std::system_error
  ~SocketListener();
  SocketListener(const SocketListener&) = delete;
  SocketListener& operator=(const SocketListener&) = delete;

  const std::string& address() const;  // "unix:<name>", to be published
  int fd() const;

 private:
  int fd_ = -1;
  std::string address_;
};

struct SocketSetup {
  std::int32_t rank = 0;
  std::vector<std::string> addresses;  // by rank
  RunToken token{};
  std::uint64_t run = 0;
  std::int64_t timeout_ms = 60000;
  // Asked several times a second; true ends the set-up (signals).
  std::function<bool()> interrupted;
};

// Null and `status` set when a peer did not come, in words that name it, its address and what
// was seen last.
std::unique_ptr<Transport> connect_sockets(SocketListener& listener, const SocketSetup& setup,
                                           Status* status);

}  // namespace rrfp
