// SlotTable: slots that never move and are never freed before the table, recycled through
// lock-free free lists. Message pools and tables of open messages are made of it.
//
// Threads   any, for everything.
// Progress  pop() and push() are lock-free; add() takes a mutex and allocates, and is only
//           called when a free list is empty: slots grow with how many are in use at once, not
//           with how many were ever used.
// Bound     2^32 - 64 slots.
// Edges     T1  push()'s CAS is a release, pop()'s CAS an acquire: who takes a slot sees what
//               its last user wrote. CAS chains on one word keep the release sequence.
//           T2  add() publishes a block and the count by release; operator[] and size()
//               acquire.
// ABA       The head holds a tag that every change advances: a pop() that slept through 2^32
//           changes of one list would be fooled, none other. Reading `next` of a slot that
//           somebody else just took is harmless: the slot still exists, and the CAS refuses.
// Checked by tests/cpp/stress/payload_pool_stress.cc (TSan).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <mutex>

namespace rrfp {

template <class T>
class SlotTable {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;

  class FreeList {
    friend class SlotTable;
    std::atomic<std::uint64_t> head_{kNone};  // tag in the upper half, index in the lower
  };

  SlotTable() = default;
  SlotTable(const SlotTable&) = delete;
  SlotTable& operator=(const SlotTable&) = delete;
  ~SlotTable() {
    for (auto& block : blocks_) delete[] block.load(std::memory_order_relaxed);  // no threads left
  }

  T& operator[](std::uint32_t index) { return slot(index).value; }
  std::uint32_t size() const { return size_.load(std::memory_order_acquire); }  // T2

  // A slot in use from the start. Throws std::bad_alloc.
  std::uint32_t add() {
    std::lock_guard lock(grow_mutex_);
    const std::uint32_t index = size_.load(std::memory_order_relaxed);  // written under the mutex
    const std::uint32_t block = block_of(index);
    if (blocks_[block].load(std::memory_order_relaxed) == nullptr) {    // written under the mutex
      blocks_[block].store(new Slot[kFirstBlock << block], std::memory_order_release);  // T2
    }
    size_.store(index + 1, std::memory_order_release);  // T2
    return index;
  }

  void push(FreeList& list, std::uint32_t index) {
    std::uint64_t head = list.head_.load(std::memory_order_relaxed);  // checked by the CAS
    do {
      slot(index).next.store(static_cast<std::uint32_t>(head), std::memory_order_relaxed);  // T1
    } while (!list.head_.compare_exchange_weak(head, next_tag(head) | index,
                                               std::memory_order_release,     // T1
                                               std::memory_order_relaxed));   // tried again
  }

  // kNone when the list is empty.
  std::uint32_t pop(FreeList& list) {
    std::uint64_t head = list.head_.load(std::memory_order_acquire);  // T1: `next` is read below
    while (static_cast<std::uint32_t>(head) != kNone) {
      const auto index = static_cast<std::uint32_t>(head);
      const std::uint32_t next = slot(index).next.load(std::memory_order_relaxed);  // T1
      if (list.head_.compare_exchange_weak(head, next_tag(head) | next,
                                           std::memory_order_acquire,      // T1
                                           std::memory_order_acquire)) {   // T1: `next` again
        return index;
      }
    }
    return kNone;
  }

 private:
  static constexpr std::uint32_t kFirstBlock = 64;
  static constexpr std::size_t kNumBlocks = 26;

  struct Slot {
    T value{};
    std::atomic<std::uint32_t> next{kNone};
  };

  static std::uint64_t next_tag(std::uint64_t head) { return ((head >> 32) + 1) << 32; }

  // Block b holds 64 << b slots and begins at index 64 * (2^b - 1).
  static std::uint32_t block_of(std::uint32_t index) {
    return static_cast<std::uint32_t>(std::bit_width(index / kFirstBlock + 1)) - 1;
  }
  Slot& slot(std::uint32_t index) {
    const std::uint32_t block = block_of(index);
    Slot* slots = blocks_[block].load(std::memory_order_acquire);  // T2
    return slots[index - kFirstBlock * ((std::uint32_t{1} << block) - 1)];
  }

  std::array<std::atomic<Slot*>, kNumBlocks> blocks_{};
  std::atomic<std::uint32_t> size_{0};
  std::mutex grow_mutex_;
};

}  // namespace rrfp
