#include "device/stream_word.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "device/cuda_check.hpp"

namespace rrfp {

namespace {
constexpr int kLeastDriver = 11070;

// The driver is reached through the runtime, so that nothing links libcuda and the module
// loads on machines without it.
void* find_in_driver(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t result = cudaGetDriverEntryPointByVersion(name, &address, kLeastDriver,
                                                              cudaEnableDefault, &found);
  if (result == cudaSuccess && found == cudaDriverEntryPointSuccess) return address;
  cudaGetLastError();
  return nullptr;
}

std::string words_of(const char* name, const void* entry, CUresult result) {
  if (entry == nullptr) {
    return std::string("the CUDA driver has no ") + name + "; rrfp needs driver 11.7 or newer";
  }
  if (result == CUDA_SUCCESS) return {};
  return std::string(name) + " answered error " + std::to_string(static_cast<int>(result));
}
}  // namespace

std::string write_word(void* stream, std::uint32_t* address, std::uint32_t value) {
  static const auto entry =
      reinterpret_cast<PFN_cuStreamWriteValue32_v11070>(find_in_driver("cuStreamWriteValue32"));
  CUresult result = CUDA_ERROR_NOT_FOUND;
  if (entry != nullptr) {
    result = entry(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(address), value,
                   CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  return words_of("cuStreamWriteValue32", reinterpret_cast<const void*>(entry), result);
}

std::string wait_word(void* stream, const WordPoint& point) {
  static const auto entry =
      reinterpret_cast<PFN_cuStreamWaitValue32_v11070>(find_in_driver("cuStreamWaitValue32"));
  CUresult result = CUDA_ERROR_NOT_FOUND;
  if (entry != nullptr) {
    result = entry(static_cast<CUstream>(stream),
                   reinterpret_cast<CUdeviceptr>(point.on_device), point.value,
                   CU_STREAM_WAIT_VALUE_GEQ);
  }
  return words_of("cuStreamWaitValue32", reinterpret_cast<const void*>(entry), result);
}

std::uint32_t* device_address(const std::uint32_t* word) {
  void* address = nullptr;
  cuda_require(cudaHostGetDevicePointer(&address, const_cast<std::uint32_t*>(word), 0),
               "cudaHostGetDevicePointer", -1);
  return static_cast<std::uint32_t*>(address);
}

}  // namespace rrfp
