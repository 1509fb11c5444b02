#include "comm/nccl_edge.hpp"

#include "base/check.hpp"
#include "device/cuda_check.hpp"

namespace rrfp {

NcclEdgeEnd::NcclEdgeEnd(const NcclLibrary& library, int device, bool is_source,
                         std::int32_t peer)
    : library_(library), device_(device), is_source_(is_source), peer_(peer) {
  DeviceGuard guard(device);
  int least = 0;
  int greatest = 0;
  cuda_require(cudaDeviceGetStreamPriorityRange(&least, &greatest),
               "cudaDeviceGetStreamPriorityRange", device);
  cuda_require(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
               "cudaStreamCreateWithPriority", device);
  timeline_ = std::make_unique<StreamTimeline>(device, stream_);
}

NcclEdgeEnd::~NcclEdgeEnd() {
  // Abort, not finalize: the latter waits for the peer, which may be gone.
  start_abort();
  if (abort_thread_.joinable()) abort_thread_.join();
  timeline_.reset();
  DeviceGuard guard(device_);
  cudaStreamDestroy(stream_);
}

std::string NcclEdgeEnd::connect(const ncclUniqueId& id) {
  DeviceGuard guard(device_);
  const int rank_on_edge = is_source_ ? 0 : 1;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;  // a non-blocking communicator costs 76 us a message
  ncclComm_t comm = nullptr;
  std::string failure =
      nccl_words(library_, library_.comm_init_rank_config(&comm, 2, id, rank_on_edge, &config),
                 "ncclCommInitRankConfig");
  if (!failure.empty()) return failure;
  comm_.store(comm, std::memory_order_release);  // N2
  std::uint32_t* probe = nullptr;
  if (const cudaError_t result = cudaMalloc(&probe, sizeof *probe); result != cudaSuccess) {
    return cuda_words(result, "cudaMalloc", device_);
  }
  const ncclResult_t result =
      is_source_ ? library_.send(probe, sizeof *probe, ncclInt8, 1, comm, stream_)
                 : library_.recv(probe, sizeof *probe, ncclInt8, 0, comm, stream_);
  failure = nccl_words(library_, result, is_source_ ? "the first ncclSend" : "the first ncclRecv");
  if (failure.empty()) {
    const cudaError_t finished = cudaStreamSynchronize(stream_);
    if (finished != cudaSuccess) failure = cuda_words(finished, "cudaStreamSynchronize", device_);
  }
  cudaFree(probe);
  return failure;
}

std::string NcclEdgeEnd::send(std::span<const Segment> segments, WordPoint* sent) {
  DeviceGuard guard(device_);
  ncclComm_t comm = comm_.load(std::memory_order_acquire);  // N2
  ncclResult_t result = library_.group_start();
  for (const Segment& segment : segments) {
    if (segment.bytes == 0 || result != ncclSuccess) continue;
    result = library_.send(segment.data, segment.bytes, ncclInt8, 1, comm, stream_);
  }
  const ncclResult_t ended = library_.group_end();
  return finish(result == ncclSuccess ? ended : result, "ncclSend", sent);
}

std::string NcclEdgeEnd::recv(std::span<const std::uint64_t> segment_bytes, std::byte* target,
                              WordPoint* arrived) {
  DeviceGuard guard(device_);
  ncclComm_t comm = comm_.load(std::memory_order_acquire);  // N2
  ncclResult_t result = library_.group_start();
  for (const std::uint64_t bytes : segment_bytes) {
    if (bytes > 0 && result == ncclSuccess) {
      result = library_.recv(target, bytes, ncclInt8, 0, comm, stream_);
    }
    target += padded_bytes(bytes);
  }
  const ncclResult_t ended = library_.group_end();
  return finish(result == ncclSuccess ? ended : result, "ncclRecv", arrived);
}

std::string NcclEdgeEnd::finish(ncclResult_t result, const char* call, WordPoint* point) {
  std::string failure = nccl_words(library_, result,
                                   call + std::string(is_source_ ? " to rank " : " from rank ") +
                                       std::to_string(peer_));
  if (failure.empty()) failure = timeline_->record(point);
  if (failure.empty()) last_ = *point;
  return failure;
}

std::string NcclEdgeEnd::check() {
  DeviceGuard guard(device_);
  const cudaError_t result = cudaStreamQuery(stream_);
  if (result != cudaSuccess && result != cudaErrorNotReady) {
    return cuda_words(result, "cudaStreamQuery", device_);
  }
  ncclComm_t comm = comm_.load(std::memory_order_acquire);  // N2
  if (comm == nullptr) return {};
  ncclResult_t asynchronous = ncclSuccess;
  library_.comm_get_async_error(comm, &asynchronous);
  return nccl_words(library_, asynchronous,
                    "the NCCL edge with rank " + std::to_string(peer_));
}

void NcclEdgeEnd::start_abort() {
  ncclComm_t comm = comm_.exchange(nullptr, std::memory_order_acq_rel);  // N2
  if (comm == nullptr) {
    if (!abort_thread_.joinable()) is_aborted_.store(true, std::memory_order_release);  // N1
    return;
  }
  abort_thread_ = std::thread([this, comm] {
    DeviceGuard guard(device_);
    library_.comm_abort(comm);
    is_aborted_.store(true, std::memory_order_release);  // N1
  });
}

}  // namespace rrfp
