#include "device/cuda_support.hpp"

namespace rrfp {

CudaSupport cuda_support() {
  CudaSupport support;
  support.refusal =
      "this build of rrfp has no CUDA in it; install nvidia-nccl-cu13 and the CUDA runtime "
      "headers and build again with RRFP_CUDA on";
  return support;
}

}  // namespace rrfp
