// PromisedMessages: messages of the current step whose payload is still on its way to the device.
// Each has its place already and a word that will say that it is there, so that a stream can
// wait for it. Its task is ready when it arrives; before that it is launched, with its stream
// waiting, only where there is no choice to make: in a fixed order, or when nothing is ready, the
// device has run dry and this message alone is on its way. And only when this rank owes its peers
// nothing (Transport::owes_sends), so that ranks do not wait for one another in a circle.
//
// Threads  add(), size(): any. The rest: the worker.
// Progress add() is lock-free, size() wait-free.
// Checked  tests/cpp/unit/promised_messages_test.cc
// Bound    What the peers' in-flight limits let them send.
// Edges    P1 of PushList. Q1: num_ is raised before the push, and lowered with release after the
//          message was delivered: who acquires a 0 finds the engine with everything it was told.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/push_list.hpp"
#include "comm/message.hpp"

namespace rrfp {

class PromisedMessages {
 public:
  void add(InboundMessage* message) {
    num_.fetch_add(1, std::memory_order_relaxed);  // Q1
    added_.push(message);
  }

  std::int32_t size() const { return num_.load(std::memory_order_acquire); }  // Q1

  // Hands those that have arrived to `deliver`, oldest first; all of them: also the others.
  template <class Deliver>
  bool deliver(bool all, const Deliver& deliver) {
    if (size() == 0) return false;
    collect();
    const std::size_t num_delivered = std::erase_if(waiting_, [&](InboundMessage* message) {
      if (!all && !word_reached(message->arrived)) return false;
      deliver(message);
      num_.fetch_sub(1, std::memory_order_release);  // Q1
      return true;
    });
    return num_delivered > 0;
  }

 private:
  void collect() {
    for (InboundMessage* message = added_.take_all(); message != nullptr;) {
      waiting_.push_back(std::exchange(message, message->next));
    }
  }

  PushList<InboundMessage> added_;
  std::vector<InboundMessage*> waiting_;  // oldest first
  std::atomic<std::int32_t> num_{0};      // in both
};

}  // namespace rrfp
