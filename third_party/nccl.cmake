# NCCL: its header only. The library is the one that torch has loaded, found at run time.
# Sets RRFP_NCCL_MISSING to what is not there, or RRFP_NCCL_INCLUDE. Include cuda.cmake first.
find_path(RRFP_NCCL_INCLUDE nccl.h
          HINTS $ENV{NCCL_HOME} ${RRFP_NVIDIA_FOLDERS} $ENV{CUDA_HOME} /usr/local/cuda
          PATH_SUFFIXES include)
mark_as_advanced(RRFP_NCCL_INCLUDE)
set(RRFP_NCCL_MISSING "")
if(NOT RRFP_NCCL_INCLUDE)
  set(RRFP_NCCL_MISSING "no NCCL header was found; pip install nvidia-nccl-cu13 brings it")
endif()
