#include "device/stream_timeline.hpp"

#include <cuda_runtime_api.h>

#include <thread>

#include "base/clock.hpp"
#include "device/cuda_check.hpp"

namespace rrfp {

StreamTimeline::StreamTimeline(int device, void* stream) : device_(device), stream_(stream) {
  DeviceGuard guard(device);
  void* memory = nullptr;
  cuda_require(cudaHostAlloc(&memory, 64, cudaHostAllocPortable | cudaHostAllocMapped),
               "cudaHostAlloc", device);
  word_ = static_cast<std::uint32_t*>(memory);
  *word_ = 0;
  word_on_device_ = device_address(word_);
}

StreamTimeline::~StreamTimeline() {
  const std::int64_t deadline_ns = steady_now_ns() + kSettleMs * 1000000;
  while (!word_reached({word_, last_value_})) {
    if (steady_now_ns() > deadline_ns) return;
    std::this_thread::yield();
  }
  cudaFreeHost(word_);
}

std::string StreamTimeline::record(WordPoint* point) {
  DeviceGuard guard(device_);
  std::lock_guard lock(mutex_);
  std::string refusal = write_word(stream_, word_on_device_, last_value_ + 1);
  if (!refusal.empty()) return refusal;
  *point = {word_, ++last_value_, word_on_device_};
  return {};
}

}  // namespace rrfp
