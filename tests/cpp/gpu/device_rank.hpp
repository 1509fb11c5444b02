// One rank with a device transport, a compute stream and a progress thread: what the tests and
// the benchmark of device messages are made of. The channel is named by RRFP_TEST_CHANNEL
// (ipc, nccl); RRFP_TEST_NCCL is the path of the NCCL library, which is loaded as torch would.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "base/clock.hpp"
#include "comm/device_transport.hpp"
#include "comm/payload_pool.hpp"
#include "device/cuda_check.hpp"
#include "device/stream_timeline.hpp"
#include "gpu/gpu_load.hpp"
#include "gpu/rank_processes.hpp"

namespace rrfp::test {

inline std::string channel_name() {
  const char* name = std::getenv("RRFP_TEST_CHANNEL");
  return name == nullptr ? "ipc" : name;
}

// Whether the ipc channel follows streams; RRFP_TEST_STREAMS set to off: not.
inline bool follows_streams() {
  const char* wanted = std::getenv("RRFP_TEST_STREAMS");
  return wanted == nullptr || std::string(wanted) != "off";
}

inline void require(cudaError_t result, const char* call) { cuda_require(result, call, -1); }

// Memory that host and device both see, zeroed.
template <class T>
T* shared_with_device() {
  void* memory = nullptr;
  require(cudaHostAlloc(&memory, sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped),
          "cudaHostAlloc");
  std::memset(memory, 0, sizeof(T));
  return static_cast<T*>(memory);
}

// An outbound message with device memory of its own; used again after on_sent().
struct TestSend : OutboundMessage {
  std::byte* memory = nullptr;
  std::uint64_t capacity_bytes = 0;
  Status status;
  bool is_ended = false;
};

class DeviceRank final : public MessageSink {
 public:
  explicit DeviceRank(RankContext& context, std::uint64_t slab_bytes = 8 << 20,
                      std::int64_t held_up_ms = DeviceTransport::kHeldUpMs);
  ~DeviceRank() override;

  // Segments of these sizes (multiples of 4), filled with words of seed, seed + 1, ... by a
  // kernel that comes after `busy_us` of other work, and then the device's clock to *stamp (null:
  // not). `send` must have room for them.
  void post(int peer, TestSend& send, const std::vector<std::uint64_t>& sizes,
            std::uint32_t seed, std::int64_t busy_us, std::uint64_t* stamp = nullptr);
  // The words are there already.
  void post_computed(int peer, TestSend& send, const std::vector<std::uint64_t>& sizes,
                     std::uint32_t seed);
  std::unique_ptr<TestSend> make_send(std::uint64_t capacity_bytes);
  bool wait_ended(const TestSend& send, std::int64_t timeout_ms = 30000);
  // Null at the time-out. The payload may still be on its way.
  InboundMessage* wait_arrived(std::int64_t timeout_ms = 30000);
  // Enqueues the wait for what is on its way, the check of its words on the compute stream, then
  // poison, then gives it back.
  void check_and_release(InboundMessage* message);
  // Of everything checked so far; the stream is synchronised.
  unsigned long long num_wrong();
  bool wait_lost(std::int64_t timeout_ms);
  Status lost_status();
  std::size_t num_headers();

  void on_header(RecvTicket ticket, const MessageHeader& header,
                 std::span<const std::byte> metadata) override;
  void on_message(std::int32_t peer, InboundMessage* message) override;
  void on_arrived() override;
  void on_sent(OutboundMessage* message, const Status& status) override;
  void on_control(std::int32_t, const MessageHeader&, std::span<const std::byte>) override {}
  void on_peer_lost(std::int32_t peer, const Status& status) override;

  DeviceTransport& transport() { return *transport_; }
  int device() const { return device_; }
  void* stream() const { return stream_; }
  std::function<void(std::int64_t)> on_arrival;  // on the progress thread, with the time; each
  std::atomic<bool> is_held_up{false};  // the progress thread, at the next header
  bool answers_headers = true;  // false: tickets are kept in `kept_headers`
  std::vector<std::pair<RecvTicket, MessageHeader>> kept_headers;
  void answer(RecvTicket ticket, const MessageHeader& header,
              std::span<const std::byte> metadata);

 private:
  void tell_arrivals();
  template <class Condition>
  bool wait(std::int64_t timeout_ms, Condition condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), condition);
  }
  static void describe(TestSend& send, const std::vector<std::uint64_t>& sizes,
                       std::uint32_t seed);
  std::unique_ptr<DataChannel> open_channel(RankContext& context, std::uint64_t slab_bytes,
                                            std::shared_ptr<ReceiveMemory>* memory);

  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<StreamTimeline> timeline_;
  unsigned long long* num_wrong_ = nullptr;
  PayloadPool pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<InboundMessage*> arrived_;
  std::vector<WordPoint> on_their_way_;  // the progress thread's, for on_arrival
  std::size_t num_headers_ = 0;
  Status lost_status_;
  std::atomic<bool> is_ending_{false};
  std::unique_ptr<DeviceTransport> transport_;
  std::thread progress_thread_;
};

}  // namespace rrfp::test
