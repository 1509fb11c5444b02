#include "device/cuda_support.hpp"

#include <cuda_runtime_api.h>

#include "device/cuda_check.hpp"

namespace rrfp {

CudaSupport cuda_support() {
  CudaSupport support;
  support.is_built = true;
  cudaRuntimeGetVersion(&support.runtime_version);
  cudaDriverGetVersion(&support.driver_version);
  const cudaError_t result = cudaGetDeviceCount(&support.num_devices);
  if (support.driver_version == 0) {
    support.refusal = "this machine has no NVIDIA driver; rrfp runs on the CPU here";
  } else if (result != cudaSuccess) {
    support.refusal = cuda_words(result, "cudaGetDeviceCount", -1);
  } else if (support.num_devices == 0) {
    support.refusal = "the NVIDIA driver shows no device to this process; look at "
                      "CUDA_VISIBLE_DEVICES";
  }
  if (!support.refusal.empty()) support.num_devices = 0;
  return support;
}

}  // namespace rrfp
