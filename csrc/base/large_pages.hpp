// LargePages: memory in pages of 2 MiB, for state of gigabytes that is visited all over: with
// pages of 4 KiB nearly every visit would miss the translation cache. Small requests come from
// the heap, so it costs a small user nothing.
//
// The kernel may refuse (transparent_hugepage is "never"): then the memory is ordinary.
// Threads  any; it keeps nothing.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory_resource>
#include <new>

namespace rrfp {

class LargePages : public std::pmr::memory_resource {
 private:
  static constexpr std::size_t kPageBytes = std::size_t{2} << 20;

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (bytes < kPageBytes || alignment > kPageBytes) {
      return ::operator new(bytes, std::align_val_t{alignment});
    }
    const std::size_t rounded = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    void* const memory = std::aligned_alloc(kPageBytes, rounded);
    if (memory == nullptr) throw std::bad_alloc();
    madvise(memory, rounded, MADV_HUGEPAGE);  // a wish: see above
    return memory;
  }

  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    if (bytes < kPageBytes || alignment > kPageBytes) {
      ::operator delete(memory, std::align_val_t{alignment});
    } else {
      std::free(memory);
    }
  }

  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return dynamic_cast<const LargePages*>(&other) != nullptr;
  }
};

}  // namespace rrfp
