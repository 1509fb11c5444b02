// ComputeStream: the stream on which a rank launches its tasks, as the runtime's Python side
// sees it: points in it that the host can ask about, and the reader of what comes in.
//
// Threads  The rank's worker.
// Lifetime Outlives the transport: a message on its way out names a word of it.
#pragma once

#include <string>

#include "device/stream_word.hpp"

namespace rrfp::python {

class ComputeStream {
 public:
  virtual ~ComputeStream() = default;
  virtual int device() const = 0;
  // From now on; the stream outlives this object. Returns why it could not, or nothing.
  virtual std::string bind(void* stream) = 0;
  // Around everything that a task enqueues, on this stream and on others that this one waits for
  // in the end: what is received and given back in between is used again after the task's end.
  virtual void begin_task() = 0;
  virtual void end_task() = 0;
  // A point after everything launched so far. Returns why it could not, or nothing.
  virtual std::string record(WordPoint* point) = 0;
  // What is launched from now on comes after the point. Returns why it could not, or nothing.
  virtual std::string wait(const WordPoint& point) = 0;
};

}  // namespace rrfp::python
