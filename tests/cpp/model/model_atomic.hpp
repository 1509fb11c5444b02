// ModelAtomic: the stand-in for std::atomic whose every access is a step of the Explorer. It
// ignores memory orders: the model is sequentially consistent.
#pragma once

#include <atomic>
#include <cstdint>

#include "model/explorer.hpp"

namespace rrfp::test {

template <class T>
class ModelAtomic {
  static_assert(sizeof(T) == sizeof(std::uint64_t));

 public:
  ModelAtomic() { Explorer::current()->enroll(&value_); }

  T load(std::memory_order) const {
    Explorer::current()->step();
    return observed(value_);
  }
  void store(T value, std::memory_order) {
    Explorer::current()->step();
    value_ = value;
    observed(value);
  }
  T fetch_or(T bits, std::memory_order) {
    Explorer::current()->step();
    const T before = value_;
    value_ |= bits;
    return observed(before);
  }
  T fetch_and(T bits, std::memory_order) {
    Explorer::current()->step();
    const T before = value_;
    value_ &= bits;
    return observed(before);
  }

  bool compare_exchange_strong(T& expected, T desired, std::memory_order, std::memory_order) {
    Explorer::current()->step();
    const T before = observed(value_);
    if (before == expected) {
      value_ = desired;
      return true;
    }
    expected = before;
    return false;
  }

 private:
  static T observed(T value) {
    Explorer::current()->observe(value);
    return value;
  }

  T value_ = 0;
};

}  // namespace rrfp::test
