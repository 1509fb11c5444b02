// From a CUDA result to words, and the calling thread's device for the length of a scope.
// Only sources that are built with CUDA include this.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace rrfp {

// Set-up only: the data path returns a Status instead.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// "cudaMalloc on device 1 answered out of memory (cudaErrorMemoryAllocation)". Clears the
// calling thread's last error, which would otherwise surface in somebody else's check.
std::string cuda_words(cudaError_t result, const char* call, int device);

// Throws DeviceError unless the call succeeded.
void cuda_require(cudaError_t result, const char* call, int device);

// Makes `device` current and puts the caller's device back at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;
  bool has_changed_ = false;
};

}  // namespace rrfp
