// BytesInFlight: what a rank holds between forward and backward where its limit is in bytes, and
// which forward may begin.
//
// Rule     Each forward has a size, known before it runs (a bound, or what was measured). Let e be
//          the earliest microbatch of the step's order whose forwards have not all been claimed
//          here, and `reserve` the most that any one microbatch takes on this rank. With
//          free = limit - held:
//          - F of e needs free >= its size, and nothing where every earlier microbatch has given
//            everything back ("first": it may not have to wait for what it alone can free);
//          - any other F needs free >= its size + what e lacks of `reserve`.
//          So one that is late finds its room kept, and nothing waits for ever, whatever the sizes
//          (docs/admission.md). Where the limit is `reserve` or more it is never exceeded.
// Threads  the rank's worker only.
// Bound    all memory is taken at construction.
// Cost     O(1) a call.
// Checked  tests/cpp/unit/arbiter_oracle_test.cc, tests/cpp/model/byte_admission_model.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.hpp"

namespace rrfp {

class BytesInFlight {
 public:
  // `sizes[chunk * num_microbatches + microbatch]`; limit_bytes -1: there is no limit in bytes.
  BytesInFlight(std::int64_t limit_bytes, std::vector<std::int64_t> sizes,
                std::int32_t num_chunks, std::int32_t num_microbatches)
      : limit_bytes_(limit_bytes),
        num_microbatches_(num_microbatches),
        sizes_(std::move(sizes)),
        held_by_(limit_bytes >= 0 ? num_microbatches : 0, 0) {
    if (!has_limit()) return;
    RRFP_INVARIANT(sizes_.size() == static_cast<std::size_t>(num_chunks) * num_microbatches,
                   "a limit in bytes needs the size of every forward");
    std::vector<std::int64_t> total(num_microbatches, 0);
    for (std::size_t i = 0; i < sizes_.size(); ++i) total[i % num_microbatches] += sizes_[i];
    reserve_bytes_ = *std::max_element(total.begin(), total.end());
  }

  bool has_limit() const { return limit_bytes_ >= 0; }

  bool admits(std::int32_t chunk, std::int32_t microbatch, std::int32_t earliest,
              bool earliest_is_first) const {
    if (microbatch == earliest && earliest_is_first) return true;
    const std::int64_t kept = microbatch == earliest ? 0 : reserve_bytes_ - held_by_[earliest];
    return limit_bytes_ - held_bytes_ >= size_of(chunk, microbatch) + kept;
  }

  void take(std::int32_t chunk, std::int32_t microbatch) {
    move(microbatch, size_of(chunk, microbatch));
    peak_bytes_ = std::max(peak_bytes_, held_bytes_);
    RRFP_INVARIANT(limit_bytes_ < reserve_bytes_ || held_bytes_ <= limit_bytes_,
                   "bytes in flight are above a limit that has room for every microbatch");
  }

  void give_back(std::int32_t chunk, std::int32_t microbatch) {
    move(microbatch, -size_of(chunk, microbatch));
    RRFP_INVARIANT(held_by_[microbatch] >= 0, "more bytes were given back than taken");
  }

  std::int64_t peak_bytes() const { return peak_bytes_; }

 private:
  std::int64_t size_of(std::int32_t chunk, std::int32_t microbatch) const {
    return sizes_[static_cast<std::size_t>(chunk) * num_microbatches_ + microbatch];
  }

  void move(std::int32_t microbatch, std::int64_t bytes) {
    held_bytes_ += bytes;
    held_by_[microbatch] += bytes;
  }

  const std::int64_t limit_bytes_;
  const std::int32_t num_microbatches_;
  const std::vector<std::int64_t> sizes_;
  std::int64_t reserve_bytes_ = 0;
  std::int64_t held_bytes_ = 0;
  std::int64_t peak_bytes_ = 0;
  std::vector<std::int64_t> held_by_;  // by microbatch
};

}  // namespace rrfp
