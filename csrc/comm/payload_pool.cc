#include "comm/payload_pool.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <mutex>
#include <new>

#include "comm/slot_table.hpp"

namespace rrfp {

namespace {

// Class 0 has no payload; class 1 up to 256 bytes; from there four classes per doubling.
constexpr std::uint32_t kNumClasses = 130;
constexpr std::uint64_t kSmallestBytes = 256;
constexpr std::uint32_t kSmallestLog2 = 8;
// A request may be served from the next classes too, up to twice its size.
constexpr std::uint32_t kClassesTried = 4;

struct SizeClass {
  std::uint32_t index;
  std::uint64_t bytes;
};

SizeClass size_class(std::uint64_t bytes) {
  if (bytes == 0) return {0, 0};
  if (bytes <= kSmallestBytes) return {1, kSmallestBytes};
  const auto log2 = static_cast<std::uint32_t>(std::bit_width(bytes - 1)) - 1;
  const std::uint64_t base = std::uint64_t{1} << log2;
  const std::uint64_t step = base / 4;
  const std::uint64_t steps = (bytes - base + step - 1) / step;
  return {1 + (log2 - kSmallestLog2) * 4 + static_cast<std::uint32_t>(steps),
          base + steps * step};
}

std::byte* allocate(std::uint64_t bytes) {
  return static_cast<std::byte*>(
      ::operator new(bytes, std::align_val_t{kPayloadAlignment}, std::nothrow));
}

void deallocate(std::byte* payload) {
  ::operator delete(payload, std::align_val_t{kPayloadAlignment});
}

}  // namespace

struct PayloadPool::State {
  struct Record : InboundMessage {
    State* state = nullptr;
    std::uint32_t index = 0;
    std::uint32_t size_class = 0;
    std::uint64_t capacity_bytes = 0;
    std::byte* buffer = nullptr;  // `payload` as acquire() gives it
  };

  ~State() {
    for (std::uint32_t i = 0; i < records.size(); ++i) deallocate(records[i].buffer);
  }

  Record* take_idle(std::uint32_t wanted);
  Record* make(SizeClass wanted) noexcept;
  void trim(std::uint64_t new_bytes);
  void unreference();

  SlotTable<Record> records;
  std::array<SlotTable<Record>::FreeList, kNumClasses> idle;
  std::atomic<std::uint64_t> references{1};  // the pool object, and every live message
  std::atomic<std::uint64_t> live_bytes{0};
  std::atomic<std::uint64_t> peak_live_bytes{0};
  std::atomic<std::uint64_t> reserved_bytes{0};
  std::mutex make_mutex;
};

PayloadPool::State::Record* PayloadPool::State::take_idle(std::uint32_t wanted) {
  const std::uint32_t end =
      wanted == 0 ? 1 : std::min(wanted + kClassesTried, kNumClasses);
  for (std::uint32_t i = wanted; i < end; ++i) {
    const std::uint32_t index = records.pop(idle[i]);
    if (index != SlotTable<Record>::kNone) return &records[index];
  }
  return nullptr;
}

// Gives idle buffers up, largest classes first, until new_bytes more keep the bound.
void PayloadPool::State::trim(std::uint64_t new_bytes) {
  // relaxed: a bound on memory; being late by one message in flight changes nothing.
  const std::uint64_t live = live_bytes.load(std::memory_order_relaxed) + new_bytes;
  const std::uint64_t peak = std::max(live, peak_live_bytes.load(std::memory_order_relaxed));
  for (std::uint32_t i = kNumClasses - 1; i > 0; --i) {
    // relaxed: written under make_mutex only.
    while (reserved_bytes.load(std::memory_order_relaxed) + new_bytes >
           2 * peak + kIdleFloorBytes) {
      const std::uint32_t index = records.pop(idle[i]);
      if (index == SlotTable<Record>::kNone) break;
      Record& record = records[index];
      deallocate(record.buffer);
      record.buffer = record.payload = nullptr;
      reserved_bytes.fetch_sub(record.capacity_bytes, std::memory_order_relaxed);  // statistics
      record.capacity_bytes = 0;
      record.size_class = 0;
      records.push(idle[0], index);
    }
  }
}

PayloadPool::State::Record* PayloadPool::State::make(SizeClass wanted) noexcept {
  std::lock_guard lock(make_mutex);
  if (wanted.bytes > 0) trim(wanted.bytes);
  std::byte* buffer = nullptr;
  if (wanted.bytes > 0 && (buffer = allocate(wanted.bytes)) == nullptr) return nullptr;
  std::uint32_t index = records.pop(idle[0]);
  if (index == SlotTable<Record>::kNone) {
    try {
      index = records.add();
    } catch (const std::bad_alloc&) {
      deallocate(buffer);
      return nullptr;
    }
  }
  Record& record = records[index];
  record.state = this;
  record.index = index;
  record.size_class = wanted.index;
  record.capacity_bytes = wanted.bytes;
  record.buffer = record.payload = buffer;
  record.release = &PayloadPool::release;
  reserved_bytes.fetch_add(wanted.bytes, std::memory_order_relaxed);  // statistics
  return &record;
}

void PayloadPool::State::unreference() {
  if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;  // P1
}

PayloadPool::PayloadPool() : state_(new State) {}

PayloadPool::~PayloadPool() { state_->unreference(); }

InboundMessage* PayloadPool::acquire(std::uint64_t payload_bytes) noexcept {
  if (payload_bytes > kMaxPayloadBytes) return nullptr;
  const SizeClass wanted = size_class(payload_bytes);
  State::Record* record = state_->take_idle(wanted.index);
  if (record == nullptr) record = state_->make(wanted);
  if (record == nullptr) return nullptr;
  state_->references.fetch_add(1, std::memory_order_relaxed);  // P1: the caller holds the pool
  // relaxed: statistics, and the bound of trim().
  const std::uint64_t live =
      state_->live_bytes.fetch_add(record->capacity_bytes, std::memory_order_relaxed) +
      record->capacity_bytes;
  std::uint64_t peak = state_->peak_live_bytes.load(std::memory_order_relaxed);   // statistics
  while (live > peak && !state_->peak_live_bytes.compare_exchange_weak(
                            peak, live, std::memory_order_relaxed)) {             // statistics
  }
  return record;
}

void PayloadPool::release(InboundMessage* message) noexcept {
  auto* record = static_cast<State::Record*>(message);
  State* state = record->state;
  record->header = MessageHeader{};
  record->metadata.clear();
  record->payload = record->buffer;
  record->attachment = nullptr;
  record->release = &PayloadPool::release;
  record->pool_release = nullptr;
  record->payload_owner = nullptr;
  record->device_index = -1;
  record->next = nullptr;
  state->live_bytes.fetch_sub(record->capacity_bytes, std::memory_order_relaxed);  // statistics
  state->records.push(state->idle[record->size_class], record->index);
  state->unreference();
}

PayloadPool::Usage PayloadPool::usage() const {
  // relaxed: figures for people and tests, exact when nothing is in flight.
  return {state_->live_bytes.load(std::memory_order_relaxed),
          state_->peak_live_bytes.load(std::memory_order_relaxed),
          state_->reserved_bytes.load(std::memory_order_relaxed), state_->records.size()};
}

}  // namespace rrfp
