# NVTX: headers only; a profiler brings the rest. Sets RRFP_NVTX_INCLUDE, or to NOTFOUND: a
# profiler then sees no ranges of rrfp. Include cuda.cmake first where CUDA is wanted.
find_path(RRFP_NVTX_INCLUDE nvtx3/nvToolsExt.h
          HINTS $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda ${RRFP_NVIDIA_FOLDERS}
          PATH_SUFFIXES include)
mark_as_advanced(RRFP_NVTX_INCLUDE)
