// ReceiveMemory: device memory for messages on their way in, in slabs from plain cudaMalloc
// that other processes can map (CUDA IPC), cut into slots of fixed size classes.
//
// Life of a slot
//   take()        the progress thread, when a message is to come
//   give_back()   whoever held the payload, when everything that reads it has been *enqueued*
//                 on the reader's stream: the slot is used again once that stream is past there.
//                 In the middle of a task, past the task's end: what the task has enqueued on
//                 streams of its own is waited for by the reader's stream then, and not before
//   put_back()    the progress thread, for a slot that nobody has read
//   quarantine()  the progress thread: a sender may still write to it; it is never used again,
//                 and its slab is left to the process rather than freed
//
// Threads  give_back(): any. bind_reader(), begin_task(), end_task(): the reader's thread, beside
//          all others. Everything else: one thread at a time.
// Progress give_back() is lock-free but for the short lock of the reader's timeline; take()
//          allocates device memory only while the working set still grows.
// Bound    Slots in use are bounded by the senders' in-flight limits. Classes are a quarter of
//          an octave apart, so a slot wastes at most a fifth of itself.
// Lifetime Shared: every slot that is out keeps the memory alive, so a payload may outlive the
//          transport it came by.
// Edges    P1 of PushList for slots that come back; D1 of StreamTimeline for their reuse.
//          M1  bind_reader() stores the timeline with release, give_back() loads with acquire.
//          A give_back() of another thread may see a task that has just ended, and leaves its slot
//          to the next end: later, never earlier. The flag orders nothing (relaxed): a slot that a
//          task reads is given back by the task's thread, or by one that got it from there.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/push_list.hpp"
#include "device/stream_timeline.hpp"

namespace rrfp {

class ReceiveMemory;

struct ReceiveSlot {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;         // of its class
  std::uint32_t slab_index = 0;
  std::uint64_t slab_offset = 0;
  std::int32_t size_class = 0;
  WordPoint last_read;             // set by give_back()
  std::shared_ptr<ReceiveMemory> memory;  // while the slot is out
  ReceiveSlot* next = nullptr;
};

class ReceiveMemory : public std::enable_shared_from_this<ReceiveMemory> {
 public:
  static constexpr std::uint64_t kDefaultSlabBytes = std::uint64_t{64} << 20;
  static constexpr std::int64_t kRetryMs = 20;

  // Allocates the first slab; throws DeviceError. `slab_bytes` is the least size of a slab.
  static std::shared_ptr<ReceiveMemory> create(int device, std::uint64_t slab_bytes);
  ~ReceiveMemory();

  // The stream that reads what comes in, from now on: call it at the start of a step, before
  // that step's payloads are given back. Throws DeviceError.
  void bind_reader(void* stream);
  // Around everything that a task of the reader enqueues.
  void begin_task() { is_in_task_.store(true, std::memory_order_relaxed); }  // a flag alone
  void end_task();

  // Null when the device has no memory left: refusal() says so, and a later call may succeed
  // (the device itself is asked again every kRetryMs at most).
  ReceiveSlot* take(std::uint64_t bytes);
  void put_back(ReceiveSlot* slot);
  void quarantine(ReceiveSlot* slot);
  static void give_back(ReceiveSlot* slot);

  // Nothing is given back to the device: a peer may still have the slabs mapped.
  void keep_for_process() { is_kept_ = true; }

  int device() const { return device_; }
  bool has_slots_out() const { return num_out_ > 0; }
  const std::string& refusal() const { return refusal_; }
  std::uint64_t reserved_bytes() const { return reserved_bytes_; }
  std::uint32_t num_slabs() const { return static_cast<std::uint32_t>(slabs_.size()); }
  std::byte* slab_base(std::uint32_t slab_index) const { return slabs_[slab_index].base; }

 private:
  static constexpr std::uint64_t kLeastClassBytes = 1024;
  static constexpr std::int32_t kNumClasses = 4 * 32;

  struct Slab {
    std::byte* base = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t used_bytes = 0;    // cut so far, from the front
    bool has_quarantined = false;
  };

  ReceiveMemory(int device, std::uint64_t slab_bytes);
  static std::uint64_t class_bytes(std::int32_t size_class);
  static std::int32_t class_for(std::uint64_t bytes);
  bool add_slab(std::uint64_t bytes);
  ReceiveSlot* cut(std::int32_t size_class);
  void collect();

  const int device_;
  const std::uint64_t slab_bytes_;
  std::vector<Slab> slabs_;
  std::deque<ReceiveSlot> slots_;                     // every slot ever cut
  std::array<ReceiveSlot*, kNumClasses> free_{};      // by class
  PushList<ReceiveSlot> held_;                        // given back in the middle of a task
  PushList<ReceiveSlot> returned_;                    // given back, not looked at yet
  std::vector<ReceiveSlot*> waiting_;                 // given back, perhaps still being read
  std::uint64_t reserved_bytes_ = 0;
  std::string refusal_;                               // of the last allocation; empty: it worked
  std::int64_t next_try_ns_ = 0;
  std::uint64_t num_out_ = 0;                         // taken, and not yet free again
  bool is_kept_ = false;
  std::atomic<bool> is_in_task_{false};
  std::atomic<StreamTimeline*> reader_{nullptr};
  std::vector<std::unique_ptr<StreamTimeline>> readers_;  // kept: words outlive their points
};

}  // namespace rrfp
