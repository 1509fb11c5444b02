// LocalTransport: ranks that are threads of one process.
//
// post_send() delivers in the sender's own thread: on_header and on_message of the receiver's
// sink, then on_sent of the sender's. An attachment is moved as it is (no copy); segments are
// copied into the buffer that post_recv gives. Needs no progress thread.
// Threads  post_send() of different ranks run side by side; a receiver's sink is entered by
//          several senders at once.
#pragma once

#include <memory>
#include <vector>

#include "comm/transport.hpp"

namespace rrfp {

// One endpoint per rank, of one hub; the hub lives as long as any of them.
std::vector<std::unique_ptr<Transport>> make_local_transports(std::int32_t num_ranks);

}  // namespace rrfp
