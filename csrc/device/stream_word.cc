#include "device/stream_word.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "device/cuda_check.hpp"

namespace rrfp {

namespace {
// The driver is reached through the runtime, so that nothing links libcuda and the module
// loads on machines without it.
PFN_cuStreamWriteValue32_v11070 find_write_value() {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t result = cudaGetDriverEntryPointByVersion(
      "cuStreamWriteValue32", &address, 11070, cudaEnableDefault, &found);
  if (result != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<PFN_cuStreamWriteValue32_v11070>(address);
}
}  // namespace

std::string write_word(void* stream, std::uint32_t* address, std::uint32_t value) {
  static const PFN_cuStreamWriteValue32_v11070 write_value = find_write_value();
  if (write_value == nullptr) {
    return "the CUDA driver has no cuStreamWriteValue32; rrfp needs driver 11.7 or newer";
  }
  const CUresult result =
      write_value(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(address), value,
                  CU_STREAM_WRITE_VALUE_DEFAULT);
  if (result == CUDA_SUCCESS) return {};
  return "cuStreamWriteValue32 answered error " + std::to_string(static_cast<int>(result));
}

std::uint32_t* device_address(std::uint32_t* word) {
  void* address = nullptr;
  cuda_require(cudaHostGetDevicePointer(&address, word, 0), "cudaHostGetDevicePointer", -1);
  return static_cast<std::uint32_t*>(address);
}

}  // namespace rrfp
