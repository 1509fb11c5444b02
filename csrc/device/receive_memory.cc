#include "device/receive_memory.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>

#include "base/check.hpp"
#include "base/clock.hpp"
#include "device/cuda_check.hpp"

namespace rrfp {

std::shared_ptr<ReceiveMemory> ReceiveMemory::create(int device, std::uint64_t slab_bytes) {
  std::shared_ptr<ReceiveMemory> memory(new ReceiveMemory(device, slab_bytes));
  if (!memory->add_slab(slab_bytes)) throw DeviceError(memory->refusal_);
  return memory;
}

ReceiveMemory::ReceiveMemory(int device, std::uint64_t slab_bytes)
    : device_(device), slab_bytes_(slab_bytes) {}

ReceiveMemory::~ReceiveMemory() {
  DeviceGuard guard(device_);
  for (const Slab& slab : slabs_) {
    if (!is_kept_ && !slab.has_quarantined) cudaFree(slab.base);
  }
}

void ReceiveMemory::bind_reader(void* stream) {
  end_task();  // one that has failed
  for (const auto& reader : readers_) {
    if (reader->stream() == stream) {
      reader_.store(reader.get(), std::memory_order_release);  // M1
      return;
    }
  }
  readers_.push_back(std::make_unique<StreamTimeline>(device_, stream));
  reader_.store(readers_.back().get(), std::memory_order_release);  // M1
}

// Classes 4k .. 4k+3 are 1, 1.25, 1.5 and 1.75 times 1024 << k; all are multiples of 256.
std::uint64_t ReceiveMemory::class_bytes(std::int32_t size_class) {
  return ((kLeastClassBytes << (size_class / 4)) / 4) * (4 + size_class % 4);
}

std::int32_t ReceiveMemory::class_for(std::uint64_t bytes) {
  if (bytes <= kLeastClassBytes) return 0;
  const int octave = std::bit_width(bytes - 1) - std::bit_width(kLeastClassBytes);
  std::int32_t size_class = 4 * octave;
  while (class_bytes(size_class) < bytes) ++size_class;
  return size_class;
}

bool ReceiveMemory::add_slab(std::uint64_t bytes) {
  const std::int64_t now_ns = steady_now_ns();
  if (!refusal_.empty() && now_ns < next_try_ns_) return false;
  next_try_ns_ = now_ns + kRetryMs * 1000000;
  DeviceGuard guard(device_);
  Slab slab;
  slab.bytes = std::max(bytes, slab_bytes_);
  void* base = nullptr;
  const cudaError_t result = cudaMalloc(&base, slab.bytes);
  if (result != cudaSuccess) {
    refusal_ = cuda_words(result, "cudaMalloc", device_) + " for " +
               std::to_string(slab.bytes) + " bytes of receive memory, beside " +
               std::to_string(reserved_bytes_) + " bytes that rrfp holds already";
    return false;
  }
  refusal_.clear();
  slab.base = static_cast<std::byte*>(base);
  slabs_.push_back(slab);
  reserved_bytes_ += slab.bytes;
  return true;
}

ReceiveSlot* ReceiveMemory::cut(std::int32_t size_class) {
  const std::uint64_t bytes = class_bytes(size_class);
  std::uint32_t index = 0;
  while (index < slabs_.size() && slabs_[index].bytes - slabs_[index].used_bytes < bytes) ++index;
  if (index == slabs_.size() && !add_slab(bytes)) return nullptr;
  Slab& slab = slabs_[index];
  ReceiveSlot& slot = slots_.emplace_back();
  slot.data = slab.base + slab.used_bytes;
  slot.bytes = bytes;
  slot.slab_index = index;
  slot.slab_offset = slab.used_bytes;
  slot.size_class = size_class;
  slab.used_bytes += bytes;
  return &slot;
}

void ReceiveMemory::end_task() {
  is_in_task_.store(false, std::memory_order_relaxed);  // a flag alone
  ReceiveSlot* slot = held_.take_all();
  if (slot == nullptr) return;
  StreamTimeline* const reader = reader_.load(std::memory_order_acquire);  // M1
  WordPoint point;
  if (reader != nullptr && !reader->record(&point).empty()) return;  // as in give_back()
  while (slot != nullptr) {
    ReceiveSlot* const next = slot->next;
    slot->last_read = point;
    returned_.push(slot);
    slot = next;
  }
}

void ReceiveMemory::collect() {
  for (ReceiveSlot* slot = returned_.take_all(); slot != nullptr;) {
    ReceiveSlot* const next = slot->next;
    waiting_.push_back(slot);
    slot = next;
  }
  std::erase_if(waiting_, [this](ReceiveSlot* slot) {
    if (!word_reached(slot->last_read)) return false;
    put_back(slot);
    return true;
  });
}

ReceiveSlot* ReceiveMemory::take(std::uint64_t bytes) {
  const std::int32_t size_class = class_for(bytes);
  RRFP_INVARIANT(size_class < kNumClasses, "a payload is larger than any size class");
  if (free_[size_class] == nullptr) collect();
  ReceiveSlot* slot = free_[size_class];
  if (slot != nullptr) {
    free_[size_class] = slot->next;
  } else {
    slot = cut(size_class);
  }
  if (slot != nullptr) {
    slot->memory = shared_from_this();
    ++num_out_;
  }
  return slot;
}

void ReceiveMemory::put_back(ReceiveSlot* slot) {
  --num_out_;
  slot->memory.reset();
  slot->last_read = {};
  slot->next = free_[slot->size_class];
  free_[slot->size_class] = slot;
}

void ReceiveMemory::quarantine(ReceiveSlot* slot) {
  slabs_[slot->slab_index].has_quarantined = true;
  --num_out_;
  slot->memory.reset();
}

void ReceiveMemory::give_back(ReceiveSlot* slot) {
  // Declared first: the memory, and with it the slot, may end with this reference.
  const std::shared_ptr<ReceiveMemory> memory = std::move(slot->memory);
  if (memory->is_in_task_.load(std::memory_order_relaxed)) {  // a flag alone
    memory->held_.push(slot);
    return;
  }
  StreamTimeline* const reader = memory->reader_.load(std::memory_order_acquire);  // M1
  WordPoint point;
  // A stream that takes no more work (a failed device, the end of the process) never gets past
  // the point: the slot then stays out.
  if (reader != nullptr && !reader->record(&point).empty()) return;
  slot->last_read = point;
  memory->returned_.push(slot);
}

}  // namespace rrfp
