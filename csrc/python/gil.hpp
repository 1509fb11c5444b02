// The GIL, for threads that the interpreter may end without.
//
// Before Python 3.14 a daemon thread that asks for the GIL while the interpreter ends is ended on
// the spot by pthread_exit(). That unwinds the stack, and a destructor which the unwinding leaves,
// as that of pybind11's gil_scoped_release, ends the whole process by std::terminate(): an abort
// instead of the program's exit status. Here such a thread stays where it is until the process is
// gone, as Python 3.14 has it.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace rrfp::python {

[[noreturn]] inline void stay_until_exit() {
  while (true) ::pause();
}

// Gives the GIL up for a scope.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding of pthread_exit(); nothing else is thrown
      stay_until_exit();
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

// Holds it for a scope in which it was given up, on a thread that Python knows.
class GilAcquire {
 public:
  GilAcquire() {
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {  // as above
      stay_until_exit();
    }
  }
  ~GilAcquire() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace rrfp::python
