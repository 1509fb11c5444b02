// NcclEdgeEnd: this rank's end of one directed edge: communicator, stream, one operation at a
// time. Set-up and abort run on threads of their own, everything else on the progress thread.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "comm/message.hpp"
#include "comm/nccl_library.hpp"
#include "device/stream_timeline.hpp"

namespace rrfp {

class NcclEdgeEnd {
 public:
  NcclEdgeEnd(const NcclLibrary& library, int device, bool is_source, std::int32_t peer);
  ~NcclEdgeEnd();
  NcclEdgeEnd(const NcclEdgeEnd&) = delete;
  NcclEdgeEnd& operator=(const NcclEdgeEnd&) = delete;

  // Blocks until the peer has come, in initialisation and then in the first message. Returns
  // why not, or nothing.
  std::string connect(const ncclUniqueId& id);

  std::int32_t peer() const { return peer_; }
  bool is_source() const { return is_source_; }
  bool is_idle() const { return word_reached(last_); }
  // Host call and one stream write; the operation before has finished.
  std::string send(std::span<const Segment> segments, WordPoint* sent);
  std::string recv(std::span<const std::uint64_t> segment_bytes, std::byte* target,
                   WordPoint* arrived);
  std::string check();

  // Starts to abort, on a thread; more than once is fine.
  void start_abort();
  bool is_aborted() const { return is_aborted_.load(std::memory_order_acquire); }  // N1

 private:
  std::string finish(ncclResult_t result, const char* call, WordPoint* point);

  const NcclLibrary& library_;
  const int device_;
  const bool is_source_;
  const std::int32_t peer_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<StreamTimeline> timeline_;
  // N1: the aborting thread stores it with release after NCCL has let go of all memory.
  std::atomic<bool> is_aborted_{false};
  // N2: connect() stores it with release; who loads it, or takes it away to abort it
  // (exchange, acq_rel), acquires. Null: not initialised, or being aborted.
  std::atomic<ncclComm_t> comm_{nullptr};
  std::thread abort_thread_;
  WordPoint last_;
};

}  // namespace rrfp
