# The CUDA runtime: headers and library of a toolkit (CUDA_HOME, CUDA_PATH, /usr/local/cuda) or
# of the package nvidia-cuda-runtime, whose headers include, from CUDA 13 on, those of two more:
# nvidia-cuda-crt and nvidia-cuda-cccl. No CUDA compiler is needed for rrfp itself. The static
# library is preferred: it holds no state that another copy in the process would have to share
# (streams and events are the driver's), and loads on machines without CUDA.
# Sets RRFP_CUDA_MISSING to what is not there, or defines the target rrfp_cuda_runtime.
if(NOT Python_EXECUTABLE)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
endif()

# Folders of NVIDIA's Python packages: <site>/nvidia/{cu13,cuda_runtime,nccl}. pip's isolated builds
# take the site folders off sys.path, where find_spec looks; the interpreter still names them.
set(RRFP_NVIDIA_FOLDERS "")
if(Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u, os, site; s = u.find_spec('nvidia'); \
roots = list(s.submodule_search_locations) if s else []; \
roots += [os.path.join(folder, 'nvidia') for folder in site.getsitepackages()]; \
print(';'.join(dict.fromkeys(roots)))"
    OUTPUT_VARIABLE nvidia_roots OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  foreach(root IN LISTS nvidia_roots)
    file(GLOB folders LIST_DIRECTORIES true ${root}/*)
    list(APPEND RRFP_NVIDIA_FOLDERS ${folders})
  endforeach()
endif()

set(cuda_hints $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda ${RRFP_NVIDIA_FOLDERS})
find_path(RRFP_CUDA_INCLUDE cuda_runtime_api.h HINTS ${cuda_hints} PATH_SUFFIXES include)
find_library(RRFP_CUDA_LIBRARY NAMES libcudart_static.a libcudart.so libcudart.so.13
             libcudart.so.12 HINTS ${cuda_hints} PATH_SUFFIXES lib64 lib)
# What the headers of the runtime (crt/) and of NCCL (nv/) include, if it lies elsewhere.
find_path(RRFP_CUDA_CRT_INCLUDE crt/host_defines.h HINTS ${RRFP_CUDA_INCLUDE} ${cuda_hints}
          PATH_SUFFIXES include)
find_path(RRFP_CUDA_CCCL_INCLUDE nv/target HINTS ${RRFP_CUDA_INCLUDE} ${cuda_hints}
          PATH_SUFFIXES cccl include include/cccl)
mark_as_advanced(RRFP_CUDA_INCLUDE RRFP_CUDA_LIBRARY RRFP_CUDA_CRT_INCLUDE RRFP_CUDA_CCCL_INCLUDE)

set(RRFP_CUDA_MISSING "")
if(NOT RRFP_CUDA_INCLUDE OR NOT EXISTS ${RRFP_CUDA_INCLUDE}/cudaTypedefs.h)
  set(RRFP_CUDA_MISSING
      "no CUDA runtime header was found; a CUDA toolkit brings it, \
or pip install nvidia-cuda-runtime")
elseif(NOT RRFP_CUDA_LIBRARY)
  set(RRFP_CUDA_MISSING
      "no CUDA runtime library was found; a CUDA toolkit brings it, \
or pip install nvidia-cuda-runtime")
elseif(NOT RRFP_CUDA_CRT_INCLUDE)
  set(RRFP_CUDA_MISSING
      "the CUDA runtime header in ${RRFP_CUDA_INCLUDE} lacks crt/host_defines.h, which it \
includes; a CUDA toolkit brings it, or pip install nvidia-cuda-crt")
elseif(NOT RRFP_CUDA_CCCL_INCLUDE)
  set(RRFP_CUDA_MISSING
      "no header nv/target was found, which those of CUDA include; a CUDA toolkit brings it, \
or pip install nvidia-cuda-cccl")
else()
  file(STRINGS ${RRFP_CUDA_INCLUDE}/cuda_runtime_api.h cuda_version
       REGEX "#define CUDART_VERSION +[0-9]+")
  string(REGEX REPLACE ".*CUDART_VERSION +([0-9]+).*" "\\1" RRFP_CUDA_VERSION "${cuda_version}")
  if(RRFP_CUDA_VERSION LESS 12050)
    set(RRFP_CUDA_MISSING
        "the CUDA runtime in ${RRFP_CUDA_INCLUDE} is ${RRFP_CUDA_VERSION}, \
and rrfp needs 12050 (CUDA 12.5) or newer")
  endif()
endif()

if(NOT RRFP_CUDA_MISSING)
  add_library(rrfp_cuda_runtime INTERFACE)
  target_include_directories(rrfp_cuda_runtime SYSTEM INTERFACE ${RRFP_CUDA_INCLUDE}
                             ${RRFP_CUDA_CRT_INCLUDE} ${RRFP_CUDA_CCCL_INCLUDE})
  target_link_libraries(rrfp_cuda_runtime INTERFACE ${RRFP_CUDA_LIBRARY} ${CMAKE_DL_LIBS} rt
                        Threads::Threads)
endif()
