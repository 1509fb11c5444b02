// The part of the DLPack ABI (version 0.8, the unversioned "dltensor" capsule) that hands a
// received buffer to torch. Layout and values are the standard's; the names are ours.
#pragma once

#include <cstdint>

namespace rrfp::python {

struct DlDevice {
  std::int32_t type;   // 1: CPU, 2: CUDA
  std::int32_t index;
};

struct DlDataType {
  std::uint8_t code;   // 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t num_dimensions;
  DlDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // null: row-major and contiguous
  std::uint64_t byte_offset;
};

struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor* self);
};

inline constexpr std::int32_t kDlCpu = 1;
inline constexpr std::int32_t kDlCuda = 2;
inline constexpr const char* kDlCapsuleName = "dltensor";

}  // namespace rrfp::python
