// TaggedStack: a lock-free stack of slot indices; the slots' links are the caller's.
//
// Threads   any. Progress: lock-free, nothing is allocated.
// Edges     T1  push()'s CAS is a release, pop()'s CAS an acquire: who takes a slot sees what
//               its last user wrote. CAS chains on one word keep the release sequence.
// ABA       The head holds a tag that every change advances, so a pop() that read a link which
//           is out of date by now is refused, also when the same slot is on top again. It would
//           have to sleep through 2^32 changes to be fooled. Slots must stay readable: a link
//           is read after somebody else may have taken the slot.
// Checked by tests/cpp/stress/payload_pool_stress.cc (TSan), and tests/cpp/model/
// tagged_stack_model.cc, which also shows that without the tag it breaks.
#pragma once

#include <atomic>
#include <cstdint>

namespace rrfp {

// Atom and kTagStep are the model's: it counts every access, and takes the tag away.
template <template <class> class Atom = std::atomic, std::uint64_t kTagStep = 1>
class TaggedStack {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;  // never an index

  // link_of(index) is the slot's Atom<std::uint64_t>.
  template <class LinkOf>
  void push(std::uint32_t index, const LinkOf& link_of) {
    std::uint64_t head = head_.load(std::memory_order_relaxed);  // T1: checked by the CAS
    do {
      link_of(index).store(place_of(head), std::memory_order_relaxed);  // T1: out by the CAS
    } while (!head_.compare_exchange_weak(head, next_tag(head) | (std::uint64_t{index} + 1),
                                          std::memory_order_release,     // T1
                                          std::memory_order_relaxed));   // T1: tried again
  }

  // kNone when the stack is empty.
  template <class LinkOf>
  std::uint32_t pop(const LinkOf& link_of) {
    std::uint64_t head = head_.load(std::memory_order_acquire);  // T1: the link is read below
    while (place_of(head) != 0) {
      const auto index = static_cast<std::uint32_t>(place_of(head) - 1);
      const std::uint64_t below = link_of(index).load(std::memory_order_relaxed);  // T1
      if (head_.compare_exchange_weak(head, next_tag(head) | below,
                                      std::memory_order_acquire,      // T1
                                      std::memory_order_acquire)) {   // T1: the link again
        return index;
      }
    }
    return kNone;
  }

 private:
  // The upper half is the tag; the lower the index plus one, 0 for an empty stack.
  static std::uint64_t place_of(std::uint64_t head) { return head & UINT32_MAX; }
  static std::uint64_t next_tag(std::uint64_t head) { return ((head >> 32) + kTagStep) << 32; }

  Atom<std::uint64_t> head_{};
};

}  // namespace rrfp
