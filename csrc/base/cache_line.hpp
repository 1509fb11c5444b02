// Cache-line padding: one writer's line must not hold another writer's word.
#pragma once

#include <cstddef>

namespace rrfp {

inline constexpr std::size_t kCacheLineBytes = 64;

template <class T>
struct alignas(kCacheLineBytes) Padded {
  T value{};
};

}  // namespace rrfp
