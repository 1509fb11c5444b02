# pybind11: found through the Python package of that name (a build requirement of setup.py), else
# wherever CMake finds it, else in the headers that torch brings: a machine without a network has
# those. rrfp_add_bindings(NAME SOURCE...) makes the extension module.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
                OUTPUT_VARIABLE pybind11_hint OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(pybind11_hint)
  list(PREPEND CMAKE_PREFIX_PATH ${pybind11_hint})
endif()
find_package(pybind11 2.13 CONFIG QUIET)
if(NOT pybind11_FOUND)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
    OUTPUT_VARIABLE torch_folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(pybind11_of_torch ${torch_folder}/include)
  if(NOT EXISTS ${pybind11_of_torch}/pybind11/pybind11.h)
    message(FATAL_ERROR "rrfp: pybind11 2.13 or newer is needed to build and was not found; "
                        "run ${Python_EXECUTABLE} -m pip install pybind11")
  endif()
  file(STRINGS ${pybind11_of_torch}/pybind11/detail/common.h version_lines
       REGEX "^#define PYBIND11_VERSION_(MAJOR|MINOR|MICRO) ")
  list(TRANSFORM version_lines REPLACE ".* " "")
  list(JOIN version_lines "." pybind11_VERSION)
  string(APPEND pybind11_VERSION " of torch")
  message(STATUS "pybind11: not installed, taken from ${pybind11_of_torch}")
endif()

function(rrfp_add_bindings name)
  if(pybind11_FOUND)
    pybind11_add_module(${name} ${ARGN})
  else()
    Python_add_library(${name} MODULE WITH_SOABI ${ARGN})
    target_include_directories(${name} SYSTEM PRIVATE ${pybind11_of_torch})
  endif()
endfunction()
