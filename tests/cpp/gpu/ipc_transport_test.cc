// Device messages in the conformance suite: all ranks in this process, over real sockets, with
// copies between the devices there are.
#include <cuda_runtime_api.h>

#include <bit>
#include <map>
#include <mutex>

#include "comm/device_transport.hpp"
#include "comm/ipc_channel.hpp"
#include "device/cuda_check.hpp"
#include "gpu/rank_processes.hpp"
#include "transport/conformance.hpp"
#include "transport/conformance_endings.hpp"
#include "transport/socket_group.hpp"

namespace rrfp::test {
namespace {

constexpr std::uint64_t kSlabBytes = 1 << 20;

// The suite takes and gives back memory for each tensor. Between connected devices cudaMalloc
// and cudaFree take milliseconds, so blocks are kept, by the power of two that holds them.
std::mutex blocks_mutex;
std::map<std::byte*, std::size_t> block_bytes;
std::multimap<std::size_t, std::byte*> idle_blocks;

std::byte* allocate_on_device(std::size_t bytes) {
  const std::size_t rounded = std::bit_ceil(bytes);
  std::lock_guard lock(blocks_mutex);
  if (const auto idle = idle_blocks.find(rounded); idle != idle_blocks.end()) {
    std::byte* data = idle->second;
    idle_blocks.erase(idle);
    return data;
  }
  void* data = nullptr;
  cuda_require(cudaMalloc(&data, rounded), "cudaMalloc", -1);
  block_bytes[static_cast<std::byte*>(data)] = rounded;
  return static_cast<std::byte*>(data);
}
void free_on_device(std::byte* data) {
  std::lock_guard lock(blocks_mutex);
  idle_blocks.insert({block_bytes.at(data), data});
}
void copy_and_wait(std::byte* to, const std::byte* from, std::size_t bytes) {
  cuda_require(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy", -1);
}

std::vector<std::unique_ptr<Transport>> make_ipc_transports(std::int32_t num_ranks) {
  int num_devices = 0;
  cuda_require(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount", -1);
  auto controls = make_socket_transports(num_ranks);
  std::vector<std::unique_ptr<IpcEndpoint>> endpoints;
  std::vector<std::string> addresses;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    endpoints.push_back(
        std::make_unique<IpcEndpoint>(rank, num_ranks, rank % num_devices, kSlabBytes));
    addresses.push_back(endpoints.back()->address());
  }
  std::vector<std::unique_ptr<Transport>> transports;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    const auto memory = endpoints[index]->memory();
    std::string refusal;
    auto channel = open_ipc_channel(std::move(endpoints[index]), addresses, true, &refusal);
    if (!channel) throw std::runtime_error(refusal);
    transports.push_back(std::make_unique<DeviceTransport>(std::move(controls[index]),
                                                           std::move(channel), memory));
  }
  return transports;
}

}  // namespace

// The suite's payloads are there before they are posted, and read before they are given back:
// no stream is bound.
Setting setting() {
  return {make_ipc_transports,
          {MemoryPlace::kDevice, allocate_on_device, free_on_device, copy_and_wait, copy_and_wait},
          std::uint64_t{32} << 20};
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_on_devices(argc, argv); }
