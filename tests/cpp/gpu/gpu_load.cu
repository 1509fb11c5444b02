#include "gpu/gpu_load.hpp"

#include <cuda_runtime.h>

#include <stdexcept>

namespace rrfp::test {

namespace {

constexpr int kBusySharedBytes = 200 << 10;  // one block on each multiprocessor

__device__ std::uint64_t device_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void fill(std::uint32_t* words, std::uint64_t num_words, std::uint32_t seed) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_words;
       i += step) {
    words[i] = payload_word(seed, i);
  }
}

__global__ void check(const std::uint32_t* words, std::uint64_t num_words, std::uint32_t seed,
                      unsigned long long* num_wrong) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  unsigned long long wrong = 0;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_words;
       i += step) {
    wrong += words[i] != payload_word(seed, i);
  }
  if (wrong > 0) atomicAdd_system(num_wrong, wrong);
}

__global__ void busy(std::int64_t duration_ns) {
  extern __shared__ float values[];
  const std::uint64_t end = device_ns() + duration_ns;
  float value = threadIdx.x;
  while (device_ns() < end) {
    for (int i = 0; i < 64; ++i) value = value * 1.000001f + 0.5f;
  }
  values[threadIdx.x] = value;
}

__global__ void stamp_clock(std::uint64_t* stamp) {
  __threadfence_system();
  *stamp = device_ns();
}

__global__ void answer(const volatile std::uint32_t* go, std::uint64_t* stamp) {
  while (*go == 0) {
  }
  *stamp = device_ns();
}

void require(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

int num_blocks(std::uint64_t num_words) {
  return static_cast<int>(num_words / 1024 < 255 ? num_words / 1024 + 1 : 256);
}

}  // namespace

void launch_fill(void* stream, std::uint32_t* words, std::uint64_t num_words,
                 std::uint32_t seed) {
  fill<<<num_blocks(num_words), 256, 0, static_cast<cudaStream_t>(stream)>>>(words, num_words,
                                                                            seed);
  require(cudaGetLastError());
}

void launch_check(void* stream, const std::uint32_t* words, std::uint64_t num_words,
                  std::uint32_t seed, unsigned long long* num_wrong) {
  check<<<num_blocks(num_words), 256, 0, static_cast<cudaStream_t>(stream)>>>(words, num_words,
                                                                             seed, num_wrong);
  require(cudaGetLastError());
}

void launch_busy(void* stream, std::int64_t duration_us) {
  int device = 0;
  int num_multiprocessors = 0;
  require(cudaGetDevice(&device));
  require(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device));
  require(cudaFuncSetAttribute(busy, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kBusySharedBytes));
  busy<<<num_multiprocessors, 256, kBusySharedBytes, static_cast<cudaStream_t>(stream)>>>(
      duration_us * 1000);
  require(cudaGetLastError());
}

void launch_stamp(void* stream, std::uint64_t* stamp) {
  stamp_clock<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(stamp);
  require(cudaGetLastError());
}

void launch_answer(void* stream, const volatile std::uint32_t* go, std::uint64_t* stamp) {
  answer<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(go, stamp);
  require(cudaGetLastError());
}

}  // namespace rrfp::test
