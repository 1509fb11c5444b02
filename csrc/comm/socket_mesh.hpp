// The established connections of a rank, as a Transport; made by connect_sockets(), and by
// tests that play the peer themselves.
//
// One pass of progress() takes what was posted, asks epoll (edge-triggered) which sockets
// changed, and gives each peer a turn of at most kTurnBytes in each direction, another peer
// first each time.
// Steady path: no lock, no allocation.
// Edges    A1  abort() raises `aborted_` (release) after the status is complete; progress()
//              acquires it. See push_list.hpp, doorbell.hpp, socket_inbox.hpp for the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/fork_guard.hpp"
#include "comm/transport.hpp"

namespace rrfp {

// connections[r]: a nonblocking stream socket to rank r, past the greeting; empty at `rank`.
std::unique_ptr<Transport> make_socket_mesh(std::int32_t rank, std::uint64_t run,
                                            std::vector<Descriptor> connections);

}  // namespace rrfp
