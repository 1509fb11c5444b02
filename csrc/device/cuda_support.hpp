// What CUDA can do for rrfp here, in words. Both builds have this header: cuda_support.cc
// answers with CUDA, cuda_support_cpu.cc without.
#pragma once

#include <string>

namespace rrfp {

struct CudaSupport {
  bool is_built = false;    // this build has the CUDA sources
  int runtime_version = 0;  // of the CUDA runtime linked in, as 13000 for 13.0
  int driver_version = 0;   // of the driver, in the same form; 0: none
  int num_devices = 0;
  std::string refusal;      // why no CUDA device can be used; empty: one can
};

// Starts the CUDA driver in this process: a process forked afterwards cannot use CUDA.
CudaSupport cuda_support();

}  // namespace rrfp
