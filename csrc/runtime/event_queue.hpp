// EventQueue: events by their time; of one instant, the one pushed first comes first.
//
// Shape    A radix heap: time never goes back, so an event lies in the bucket of the highest bit
//          in which its time differs from the present. When the present moves on, the lowest
//          bucket that holds any is spread over the ones below it, in order, so that events of
//          one instant never pass one another. Memory is walked in order, and nothing is sifted.
// Threads  one.
// Cost     push() O(1). An event moves down at least a bucket each time, and only while others
//          share its bucket: about log2(events) times.
// Checked  tests/cpp/unit/event_queue_test.cc
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.hpp"

namespace rrfp {

// `Event` has `std::int64_t at_ns`, which is not negative.
template <class Event>
class EventQueue {
 public:
  bool empty() const { return occupied_ == 0 && !is_any_due(); }

  // The time of the last pop(), and whether another event is of this very instant.
  std::int64_t now_ns() const { return now_ns_; }
  bool is_any_due() const { return num_taken_ < due_.size(); }

  // Not before now_ns().
  void push(const Event& event) {
    RRFP_INVARIANT(event.at_ns >= now_ns_, "an event was put before the present");
    bucket_of(event.at_ns).push_back(event);
  }

  // The queue must not be empty. Tells `soon(event, n)` of events that will probably be popped
  // within the next n, where n is 64 at most: most several times, with less each time, some never.
  template <class Soon>
  Event pop(const Soon& soon) {
    if (!is_any_due()) move_on(soon);
    if (num_taken_ + kFew < due_.size()) soon(due_[num_taken_ + kFew], kFarthest);
    return due_[num_taken_++];
  }

 private:
  static constexpr std::size_t kFew = 4;
  static constexpr std::size_t kFarthest = 64;

  std::vector<Event>& bucket_of(std::int64_t at_ns) {
    if (at_ns == now_ns_) return due_;
    const int bit = std::bit_width(static_cast<std::uint64_t>(at_ns ^ now_ns_)) - 1;
    occupied_ |= std::uint64_t{1} << bit;
    return buckets_[bit];
  }

  template <class Soon>
  void move_on(const Soon& soon) {
    due_.clear();
    num_taken_ = 0;
    const int lowest = std::countr_zero(occupied_);
    std::vector<Event>& bucket = buckets_[lowest];
    occupied_ &= occupied_ - 1;
    if (bucket.size() <= kFarthest) {
      for (const Event& event : bucket) soon(event, bucket.size());
    }
    now_ns_ = bucket.front().at_ns;
    for (const Event& event : bucket) now_ns_ = std::min(now_ns_, event.at_ns);
    for (const Event& event : bucket) bucket_of(event.at_ns).push_back(event);  // lower ones
    bucket.clear();
  }

  std::int64_t now_ns_ = 0;
  std::vector<Event> due_;  // those of the present instant
  std::size_t num_taken_ = 0;
  std::array<std::vector<Event>, 64> buckets_;
  std::uint64_t occupied_ = 0;  // buckets that hold events, a bit each
};

}  // namespace rrfp
