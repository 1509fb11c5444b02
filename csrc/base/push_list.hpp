// PushList: any number of threads push nodes, one thread takes all of them at once.
//
// Intrusive: a node has a public `T* next`, which belongs to the list from push() until
// take_all() hands the node over.
// Threads  push(): any. take_all(): one at a time.
// Progress push() is lock-free (it repeats only when another push won), take_all() wait-free;
//          nothing is allocated.
// Bound    None of its own: whoever pushes bounds the number of nodes.
// Edges    P1  push()'s CAS releases, take_all()'s exchange acquires: what was written to a
//              node before push() is seen by its taker. Every push() is an RMW of one word, so
//              the release sequences of all pushes since the last take reach the exchange.
//              Nodes are never popped one by one, so there is no ABA.
#pragma once

#include <atomic>

namespace rrfp {

template <class T>
class PushList {
 public:
  void push(T* node) {
    T* top = head_.load(std::memory_order_relaxed);  // checked by the CAS
    do {
      node->next = top;
    } while (!head_.compare_exchange_weak(top, node, std::memory_order_release,  // P1
                                          std::memory_order_relaxed));           // tried again
  }

  // Everything pushed so far, oldest first, linked by `next`; null when there is nothing.
  T* take_all() {
    if (head_.load(std::memory_order_relaxed) == nullptr) return nullptr;  // a hint only
    T* node = head_.exchange(nullptr, std::memory_order_acquire);          // P1
    T* oldest = nullptr;
    while (node != nullptr) {
      T* const next = node->next;
      node->next = oldest;
      oldest = node;
      node = next;
    }
    return oldest;
  }

 private:
  std::atomic<T*> head_{nullptr};
};

}  // namespace rrfp
