// relax_core(): between two looks of a thread that spins. A core may be one half of a physical one,
// and in a virtual machine the kernel often does not know whose: a loop that looks without a pause
// takes issue slots from whatever runs on the other half, such as the worker.
//
// Cost: a few hundred nanoseconds on x86, a few tens elsewhere; far below what a wake-up takes.
#pragma once

namespace rrfp {

inline void relax_core() {
#if defined(__x86_64__) || defined(__i386__)
  for (int i = 0; i < 16; ++i) __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace rrfp
