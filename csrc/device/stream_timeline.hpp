// StreamTimeline: points in a CUDA stream that the host can ask about without the driver.
//
// record() enqueues "write n" on the stream, n = 1, 2, ...; a point is reached when the word
// shows n or more. The stream keeps order, so one word serves all its points.
// Threads  record(): any; a short lock keeps numbers and stream in the same order. Polling a
//          point takes no lock.
// Edges    D1 of stream_word.hpp.
// Lifetime The stream belongs to the caller and outlives the last record(). The word outlives
//          the writes: the destructor waits for the last point, and when it does not come
//          within kSettleMs the word is left to the process.
// Cost     record(): about 1 us of host time.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "device/stream_word.hpp"

namespace rrfp {

class StreamTimeline {
 public:
  static constexpr std::int64_t kSettleMs = 1000;

  // The calling thread's device need not be `device`. Throws DeviceError.
  StreamTimeline(int device, void* stream);
  ~StreamTimeline();
  StreamTimeline(const StreamTimeline&) = delete;
  StreamTimeline& operator=(const StreamTimeline&) = delete;

  // A point after everything enqueued so far. Returns why it could not, or nothing.
  std::string record(WordPoint* point);

  void* stream() const { return stream_; }
  int device() const { return device_; }

 private:
  const int device_;
  void* const stream_;
  std::mutex mutex_;  // last_value_, and its order on the stream
  std::uint32_t last_value_ = 0;
  std::uint32_t* word_ = nullptr;
  std::uint32_t* word_on_device_ = nullptr;
};

}  // namespace rrfp
