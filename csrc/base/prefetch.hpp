// prefetch(): asks for a cache line that will be touched soon, and does not wait for it. An address
// that is not worth a fetch, or no longer valid, costs nothing but the request.
#pragma once

#include <cstddef>

#include "base/cache_line.hpp"

namespace rrfp {

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// Every line of it.
inline void prefetch(const void* first, std::size_t num_bytes) {
  for (std::size_t at = 0; at < num_bytes; at += kCacheLineBytes) {
    __builtin_prefetch(static_cast<const char*>(first) + at);
  }
}

}  // namespace rrfp
