// SocketTransport: ranks that are processes. One connection to every peer carries headers,
// metadata, payload, heartbeats and the end; end-of-file without kBye is how a dead process
// is noticed. Unix sockets in the abstract namespace (nothing is left behind on any exit) between
// ranks that share it, which a connection to the name proves; TCP between the others.
//
// Set-up   Each rank opens a SocketListener and publishes its address; connect_sockets() then
//          joins every pair (the higher rank connects to the lower), both sides proving with
//          the run token that they belong to this run. A connection that cannot is closed and
//          touches nothing else. The listener is closed when all peers are there.
// Strangers  Connections that say nothing, or not the token, cost at most kMaxStrangers
//          descriptors at a time; the oldest goes first when there are more. Over TCP a peer's
//          greeting may come a while after its connection: the oldest then keeps its place for
//          kGreetingMs, and others wait in the kernel's queue.
// Threads  post_send(), post_recv(), abort(): any. progress(): the progress thread.
//          connect_sockets(): the caller.
// Order    Per peer, kAbort, kControl, kStarted and kHeartbeat pass data messages that have not
//          begun; kBye is last. A peer's messages come in one after the other: while one waits for
//          post_recv(), those behind it wait too; other peers' do not.
// Checked by tests/cpp/transport/socket_{transport,setup,processes}_test.cc.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/fork_guard.hpp"
#include "comm/transport.hpp"

namespace rrfp {

using RunToken = std::array<std::byte, 32>;

class SocketListener {
 public:
  // At a Unix socket, and at a TCP port of `host` (a numeric address of this host) unless empty.
  // Throws UserError for what is no address, std::system_error where it cannot listen.
  explicit SocketListener(const std::string& host = "", bool with_unix = true);

  const std::string& address() const { return address_; }  // to be published: socket_address.hpp
  const std::vector<Descriptor>& sockets() const { return sockets_; }
  void close() { sockets_.clear(); }

 private:
  std::vector<Descriptor> sockets_;
  std::string address_;
};

struct SocketSetup {
  std::int32_t rank = 0;
  std::vector<std::string> addresses;  // by rank
  RunToken token{};
  std::uint64_t run = 0;
  std::int64_t timeout_ms = 60000;
  // Asked at least every 100 ms; true ends the set-up (signals).
  std::function<bool()> interrupted;
};

inline constexpr std::size_t kMaxStrangers = 64;
inline constexpr std::int64_t kGreetingMs = 300;

// Null and `status` set when a peer did not come (kTimedOut; each one is named, with its address
// and what was seen last), speaks another wire version or refuses us (kProtocol), or after an
// interruption. Throws UserError for a rank or an address that cannot be, std::system_error
// when the process has no descriptors left. The listener is closed in every case.
std::unique_ptr<Transport> connect_sockets(SocketListener& listener, const SocketSetup& setup,
                                           Status* status);

}  // namespace rrfp
