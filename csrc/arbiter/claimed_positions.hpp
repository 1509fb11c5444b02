// ClaimedPositions: which hint positions of a rank have been claimed: the first that has not,
// and how many before a given one have not (the skip count).
//
// Shape    A bitmap, and over its words a Fenwick tree of claims.
// Threads  the rank's worker only.
// Bound    Fixed at construction; nothing is allocated afterwards.
// Cost     claim() and num_unclaimed_before(): O(log(positions / 64)). first_unclaimed() is
//          kept up to date by claim(), which walks each word once over the whole step.
// Checked  tests/cpp/unit/arbiter_test.cc
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace rrfp {

class ClaimedPositions {
 public:
  explicit ClaimedPositions(std::int32_t num_positions)
      : words_(num_positions / kWordBits + 1, 0), claims_(words_.size() + 1, 0) {}

  // `position` must not have been claimed.
  void claim(std::int32_t position) {
    words_[position / kWordBits] |= std::uint64_t{1} << (position % kWordBits);
    for (std::size_t node = position / kWordBits + 1; node < claims_.size(); node += node & -node) {
      ++claims_[node];
    }
    ++num_claimed_;
    advance();
  }

  bool is_claimed(std::int32_t position) const {
    return (words_[position / kWordBits] >> (position % kWordBits) & 1) != 0;
  }

  std::int32_t num_unclaimed_before(std::int32_t position) const {
    const std::uint64_t mask = (std::uint64_t{1} << (position % kWordBits)) - 1;
    std::int32_t claimed = std::popcount(words_[position / kWordBits] & mask);
    for (std::size_t node = position / kWordBits; node != 0; node &= node - 1) {
      claimed += claims_[node];
    }
    return position - claimed;
  }

  std::int32_t num_claimed() const { return num_claimed_; }
  std::int32_t first_unclaimed() const { return first_unclaimed_; }  // num_positions: none left

 private:
  static constexpr std::int32_t kWordBits = 64;

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
  std::vector<std::uint64_t> words_;
  std::vector<std::int32_t> claims_;  // the tree's nodes, from 1
};

}  // namespace rrfp
