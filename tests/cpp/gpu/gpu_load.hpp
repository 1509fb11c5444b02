// Work for the devices in tests and benchmarks: kernels that compute a payload, check one, or
// fill the device for a while. gpu_load.cu runs it on CUDA; fake_cuda.cc on the CPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define RRFP_ON_DEVICE __host__ __device__
#else
#define RRFP_ON_DEVICE
#endif

namespace rrfp::test {

// Word i of a payload with this seed.
RRFP_ON_DEVICE constexpr std::uint32_t payload_word(std::uint32_t seed, std::uint64_t i) {
  const auto mixed = static_cast<std::uint32_t>(i) * 2654435761u ^ seed * 2246822519u;
  return mixed ^ mixed >> 15;
}

// All of them enqueue on `stream` of the current device and throw std::runtime_error when they
// cannot. `words` is device memory.
void launch_fill(void* stream, std::uint32_t* words, std::uint64_t num_words, std::uint32_t seed);
// Adds the number of wrong words to *num_wrong (memory that host and device both see).
void launch_check(void* stream, const std::uint32_t* words, std::uint64_t num_words,
                  std::uint32_t seed, unsigned long long* num_wrong);
// Occupies every multiprocessor, as a large GEMM does, for duration_us.
void launch_busy(void* stream, std::int64_t duration_us);
// Writes the device's clock in ns to *stamp (memory that host and device both see).
void launch_stamp(void* stream, std::uint64_t* stamp);
// Waits for *go to become nonzero, then stamps.
void launch_answer(void* stream, const volatile std::uint32_t* go, std::uint64_t* stamp);

}  // namespace rrfp::test
