// ClaimedPositions: which hint positions of a rank have been claimed: the first that has not,
// and how many before a given one have not (the skip count).
//
// Shape    A bitmap, and over blocks of its words a Fenwick tree of claims.
// Threads  the rank's worker only.
// Bound    Fixed at construction; nothing is allocated afterwards.
// Cost     claim(): O(log(positions / 256)); num_unclaimed_before() likewise, and O(1) for what
//          stands first. first_unclaimed() is kept up to date by claim(), which walks each word
//          once over the whole step.
// Checked  tests/cpp/unit/arbiter_test.cc
#pragma once

#include <bit>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "base/prefetch.hpp"

namespace rrfp {

class ClaimedPositions {
 public:
  explicit ClaimedPositions(
      std::int32_t num_positions,
      std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : words_(num_positions / kWordBits + 1, 0, memory),
        claims_(words_.size() / kBlockWords + 2, 0, memory) {}

  // `position` must not have been claimed.
  void claim(std::int32_t position) {
    const std::uint32_t word = static_cast<std::uint32_t>(position) / kWordBits;
    words_[word] |= std::uint64_t{1} << (position % kWordBits);
    for (std::uint32_t node = word / kBlockWords + 1; node < claims_.size(); node += node & -node) {
      ++claims_[node];
    }
    ++num_claimed_;
    advance();
  }

  bool is_claimed(std::int32_t position) const {
    return (words_[position / kWordBits] >> (position % kWordBits) & 1) != 0;
  }

  std::int32_t num_unclaimed_before(std::int32_t position) const {
    if (position <= first_unclaimed_) return 0;
    const std::uint32_t last = static_cast<std::uint32_t>(position) / kWordBits;
    const std::uint64_t mask = (std::uint64_t{1} << (position % kWordBits)) - 1;
    std::int32_t claimed = std::popcount(words_[last] & mask);
    const std::uint32_t block = last / kBlockWords;
    for (std::uint32_t word = block * kBlockWords; word < last; ++word) {
      claimed += std::popcount(words_[word]);
    }
    for (std::uint32_t node = block; node != 0; node &= node - 1) claimed += claims_[node];
    return position - claimed;
  }

  void prefetch() const {
    rrfp::prefetch(&words_[first_unclaimed_ / kWordBits]);
    rrfp::prefetch(claims_.data(), claims_.size() * sizeof claims_[0]);
  }

  std::int32_t num_claimed() const { return num_claimed_; }
  std::int32_t first_unclaimed() const { return first_unclaimed_; }  // num_positions: none left

 private:
  static constexpr std::uint32_t kWordBits = 64;
  static constexpr std::uint32_t kBlockWords = 4;

  // The bit after the last position exists and stays clear: it ends the walk.
  void advance() {
    for (;;) {
      const std::uint64_t unclaimed =
          ~words_[first_unclaimed_ / kWordBits] >> (first_unclaimed_ % kWordBits);
      if (unclaimed != 0) {
        first_unclaimed_ += std::countr_zero(unclaimed);
        return;
      }
      first_unclaimed_ = (first_unclaimed_ / kWordBits + 1) * kWordBits;
    }
  }

  std::int32_t num_claimed_ = 0;
  std::int32_t first_unclaimed_ = 0;
  std::pmr::vector<std::uint64_t> words_;
  std::pmr::vector<std::int32_t> claims_;  // by block: the tree's nodes, from 1
};

}  // namespace rrfp
