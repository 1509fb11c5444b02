# pybind11: found through the Python package of that name (a build requirement of setup.py),
# else wherever CMake finds it.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
                OUTPUT_VARIABLE pybind11_hint OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(pybind11_hint)
  list(PREPEND CMAKE_PREFIX_PATH ${pybind11_hint})
endif()
find_package(pybind11 2.13 CONFIG REQUIRED)
