#include "base/check.hpp"
#include "device/cuda_support.hpp"
#include "python/device_link.hpp"

namespace rrfp::python {

std::unique_ptr<DeviceLink> make_ipc_link(std::int32_t, std::int32_t, int, bool) {
  throw UserError(cuda_support().refusal);
}

std::unique_ptr<DeviceLink> make_nccl_link(
    std::int32_t, const std::vector<std::pair<std::int32_t, std::int32_t>>&, int) {
  throw UserError(cuda_support().refusal);
}

std::vector<DeviceRank> make_device_ranks(const std::vector<int>&, std::uint64_t, std::int64_t,
                                          std::int64_t) {
  throw UserError(cuda_support().refusal);
}

}  // namespace rrfp::python
