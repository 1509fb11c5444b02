// Trace: what a profiler sees of rrfp, through NVTX: ranges and messages in the domain "rrfp",
// names of threads. A profiler brings itself in through NVTX_INJECTION64_PATH (nsys sets it)
// before the first call; a build without the NVTX header has none of it.
//
// Threads  Any. A TraceRange begins and ends on one thread, a span may end on another.
// Cost     Without a profiler one load and a branch; names are built only where one listens.
// Edges    The domain is made once, by the language's own guard of statics.
#pragma once

#include <cstdint>
#include <string>

namespace rrfp {

// Whether this process has a profiler that listens to NVTX, as the first call finds.
bool is_traced();

// One range of the thread that begins it; ranges of a thread are nested.
class TraceRange {
 public:
  TraceRange() = default;
  ~TraceRange() { end(); }
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
  // Ends the one before, if that is open.
  void begin(const std::string& name);
  void end();
  bool is_open() const { return is_open_; }

 private:
  bool is_open_ = false;
};

// A message on its way: `bytes` is its payload. 0: nobody listens.
using TraceSpan = std::uint64_t;
TraceSpan begin_span(const std::string& name, std::uint64_t bytes);
void end_span(TraceSpan span);

void trace_thread_name(const std::string& name);

}  // namespace rrfp
