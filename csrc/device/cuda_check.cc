#include "device/cuda_check.hpp"

namespace rrfp {

std::string cuda_words(cudaError_t result, const char* call, int device) {
  cudaGetLastError();
  std::string words = call;
  if (device >= 0) words += " on device " + std::to_string(device);
  return words + " answered " + cudaGetErrorString(result) + " (" + cudaGetErrorName(result) +
         ")";
}

void cuda_require(cudaError_t result, const char* call, int device) {
  if (result != cudaSuccess) throw DeviceError(cuda_words(result, call, device));
}

DeviceGuard::DeviceGuard(int device) {
  if (cudaGetDevice(&before_) == cudaSuccess && before_ == device) return;
  has_changed_ = cudaSetDevice(device) == cudaSuccess;
}

DeviceGuard::~DeviceGuard() {
  if (has_changed_ && before_ >= 0) cudaSetDevice(before_);
}

}  // namespace rrfp
