// OutboundQueue: messages on their way from the workers to the progress thread; push_list.hpp
// has the contract. Messages of one producer stay in order.
// Checked by tests/cpp/stress/outbound_queue_stress.cc (TSan).
#pragma once

#include "base/push_list.hpp"
#include "comm/message.hpp"

namespace rrfp {

using OutboundQueue = PushList<OutboundMessage>;

}  // namespace rrfp
