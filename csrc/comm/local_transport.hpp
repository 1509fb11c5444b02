// LocalTransport: ranks that are threads of one process.
//
// post_send() delivers in the sender's own thread: on_header and on_message of the receiver's
// sink, then on_sent of the sender's. When the receiver answers on_header later, post_recv()
// delivers in its thread. An attachment is moved as it is (no copy); segments are copied into
// the buffer that post_recv gives. Needs no progress thread.
// Set-up   all sinks are set before the first post_send() of any rank.
// Threads  post_send() of different ranks run side by side; a receiver's sink is entered by
//          several senders at once.
// Progress lock-free, apart from the callbacks; abort() and new slots take a mutex.
// Bound    open messages (offered, without a buffer) grow with what senders post.
// Edges    L1 phases of an open message, L2 posting against closing: local_transport.cc.
// End      A transport destroyed without having sent kBye to a peer is lost to that peer. The
//          destructor waits for threads inside its sink.
// Checked by tests/cpp/transport/local_transport_test.cc, tests/cpp/stress/
// progress_thread_stress.cc (TSan).
#pragma once

#include <memory>
#include <vector>

#include "comm/transport.hpp"

namespace rrfp {

// One endpoint per rank, of one hub; the hub lives as long as any of them.
std::vector<std::unique_ptr<Transport>> make_local_transports(std::int32_t num_ranks);

}  // namespace rrfp
