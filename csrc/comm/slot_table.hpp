// SlotTable: slots that never move and are never freed before the table, recycled through
// lock-free free lists. Message pools and tables of open messages are made of it.
//
// Threads   any, for everything.
// Progress  pop() and push() are lock-free; add() takes a mutex and allocates, and is only
//           called when a free list is empty: slots grow with how many are in use at once, not
//           with how many were ever used.
// Bound     2^32 - 64 slots.
// Edges     T1  of tagged_stack.hpp, through which slots are handed on.
//           T2  add() publishes a block and the count by release; operator[] and size()
//               acquire.
// Checked by tests/cpp/stress/payload_pool_stress.cc (TSan).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <mutex>

#include "comm/tagged_stack.hpp"

namespace rrfp {

template <class T>
class SlotTable {
 public:
  using FreeList = TaggedStack<>;
  static constexpr std::uint32_t kNone = FreeList::kNone;

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

  void push(FreeList& list, std::uint32_t index) { list.push(index, link_of()); }
  // kNone when the list is empty.
  std::uint32_t pop(FreeList& list) { return list.pop(link_of()); }

 private:
  static constexpr std::uint32_t kFirstBlock = 64;
  static constexpr std::size_t kNumBlocks = 26;

  struct Slot {
    T value{};
    std::atomic<std::uint64_t> link{0};
  };

  auto link_of() {
    return [this](std::uint32_t index) -> std::atomic<std::uint64_t>& { return slot(index).link; };
  }

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
