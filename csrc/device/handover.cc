#include "device/handover.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "device/cuda_check.hpp"

namespace rrfp {

namespace {
cudaEvent_t event_of(const HandoverPoint& point) {
  return static_cast<cudaEvent_t>(point.event);
}
}  // namespace

void connect_devices(int device, int peer) {
  if (device == peer) return;
  int can_access = 0;
  cuda_require(cudaDeviceCanAccessPeer(&can_access, device, peer), "cudaDeviceCanAccessPeer",
               device);
  if (can_access == 0) {
    throw DeviceError("device " + std::to_string(device) + " cannot reach the memory of device " +
                      std::to_string(peer) + " directly on this machine");
  }
  DeviceGuard guard(device);
  const cudaError_t result = cudaDeviceEnablePeerAccess(peer, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  cuda_require(result, "cudaDeviceEnablePeerAccess", device);
}

Handover::~Handover() {
  for (const HandoverPoint& point : idle_) cudaEventDestroy(event_of(point));
  for (const Edge& edge : edges_) {
    DeviceGuard guard(edge.source_device);
    cudaStreamDestroy(static_cast<cudaStream_t>(edge.stream));
  }
}

HandoverPoint Handover::mark(int device, void* stream) {
  DeviceGuard guard(device);
  HandoverPoint point{device, nullptr};
  {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(idle_.begin(), idle_.end(), [device](const auto& idle) {
      return idle.device == device;
    });
    if (found != idle_.end()) {
      point = *found;
      idle_.erase(found);
    }
  }
  if (point.event == nullptr) {
    cudaEvent_t event = nullptr;
    cuda_require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate",
                 device);
    point.event = event;
  }
  cuda_require(cudaEventRecord(event_of(point), static_cast<cudaStream_t>(stream)),
               "cudaEventRecord", device);
  return point;
}

void Handover::follow(int device, void* stream, const HandoverPoint& point) {
  DeviceGuard guard(device);
  cuda_require(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_of(point), 0),
               "cudaStreamWaitEvent", device);
}

bool Handover::passed(const HandoverPoint& point) const {
  const cudaError_t result = cudaEventQuery(event_of(point));
  if (result == cudaErrorNotReady) return false;
  cuda_require(result, "cudaEventQuery", point.device);
  return true;
}

void* Handover::edge_stream(int source_device, int target_device) {
  std::lock_guard lock(mutex_);
  for (const Edge& edge : edges_) {
    if (edge.source_device == source_device && edge.target_device == target_device) {
      return edge.stream;
    }
  }
  connect_devices(source_device, target_device);
  DeviceGuard guard(source_device);
  cudaStream_t stream = nullptr;
  cuda_require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate",
               source_device);
  edges_.push_back({source_device, target_device, stream});
  return stream;
}

HandoverPoint Handover::copy(std::byte* target, int target_device, const std::byte* source,
                             std::uint64_t bytes, const HandoverPoint& computed) {
  void* const stream = edge_stream(computed.device, target_device);
  follow(computed.device, stream, computed);
  DeviceGuard guard(computed.device);
  cuda_require(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault,
                               static_cast<cudaStream_t>(stream)),
               "cudaMemcpyAsync", computed.device);
  return mark(computed.device, stream);
}

void Handover::release(const HandoverPoint& point) {
  std::lock_guard lock(mutex_);
  idle_.push_back(point);
}

}  // namespace rrfp
