#include "gpu/device_rank.hpp"

#include <dlfcn.h>

#include "base/clock.hpp"
#include "comm/ipc_channel.hpp"
#include "comm/nccl_channel.hpp"
#include "comm/socket_transport.hpp"

namespace rrfp::test {

DeviceRank::DeviceRank(RankContext& context, std::uint64_t slab_bytes, std::int64_t held_up_ms) {
  const bool is_nccl = channel_name() == "nccl";
  int num_devices = 0;
  if (is_nccl) {
    // Several ranks on one device: NCCL takes them for different hosts.
    setenv("NCCL_HOSTID", std::to_string(context.rank).c_str(), 0);
    const char* path = std::getenv("RRFP_TEST_NCCL");
    if (path != nullptr && dlopen(path, RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      throw std::runtime_error(dlerror());
    }
  }
  require(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  if (num_devices >= context.num_ranks) unsetenv("NCCL_HOSTID");
  device_ = context.rank % num_devices;
  require(cudaSetDevice(device_), "cudaSetDevice");
  require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  timeline_ = std::make_unique<StreamTimeline>(device_, stream_);
  num_wrong_ = shared_with_device<unsigned long long>();

  SocketListener listener;
  SocketSetup setup;
  setup.rank = context.rank;
  setup.addresses = context.meet(listener.address());
  setup.run = 7;
  Status status;
  std::unique_ptr<Transport> control = connect_sockets(listener, setup, &status);
  if (!control) throw std::runtime_error(status.message);
  std::shared_ptr<ReceiveMemory> memory;
  std::unique_ptr<DataChannel> channel = open_channel(context, slab_bytes, &memory);
  transport_ = std::make_unique<DeviceTransport>(std::move(control), std::move(channel), memory,
                                                 held_up_ms);
  transport_->set_sink(this);
  transport_->bind_reader(stream_);
  context.meet("open");
  progress_thread_ = std::thread([this] {
    while (!is_ending_) {
      if (transport_->progress(steady_now_ns()) == 0) std::this_thread::yield();
    }
  });
}

std::unique_ptr<DataChannel> DeviceRank::open_channel(
    RankContext& context, std::uint64_t slab_bytes, std::shared_ptr<ReceiveMemory>* memory) {
  std::string refusal;
  std::unique_ptr<DataChannel> channel;
  if (channel_name() == "ipc") {
    auto endpoint = std::make_unique<IpcEndpoint>(context.rank, context.num_ranks, device_,
                                                  slab_bytes);
    *memory = endpoint->memory();
    const auto addresses = context.meet(endpoint->address());
    channel = open_ipc_channel(std::move(endpoint), addresses, follows_streams(), &refusal);
  } else {
    std::vector<NcclEdge> edges;
    for (int rank = 0; rank < context.num_ranks; ++rank) {
      edges.push_back({rank, (rank + 1) % context.num_ranks});
      edges.push_back({(rank + 1) % context.num_ranks, rank});
    }
    const NcclEndpoint endpoint(context.rank, edges, device_);
    *memory = ReceiveMemory::create(device_, slab_bytes);
    NcclSetup setup;
    setup.addresses = context.meet(endpoint.address());
    channel = open_nccl_channel(endpoint, setup, &refusal);
  }
  if (!channel) throw std::runtime_error(refusal);
  return channel;
}

DeviceRank::~DeviceRank() {
  is_ending_ = true;
  progress_thread_.join();
  transport_.reset();
  for (InboundMessage* message : arrived_) message->release(message);
  cudaStreamSynchronize(stream_);
  timeline_.reset();
}

std::unique_ptr<TestSend> DeviceRank::make_send(std::uint64_t capacity_bytes) {
  auto send = std::make_unique<TestSend>();
  void* memory = nullptr;
  DeviceGuard guard(device_);
  require(cudaMalloc(&memory, capacity_bytes + kPayloadAlignment), "cudaMalloc");
  send->memory = static_cast<std::byte*>(memory);
  send->capacity_bytes = capacity_bytes;
  return send;
}

void DeviceRank::describe(TestSend& send, const std::vector<std::uint64_t>& sizes,
                                 std::uint32_t seed) {
  send.header = MessageHeader{};
  send.header.place = MemoryPlace::kDevice;
  send.header.microbatch = static_cast<std::int32_t>(seed);
  send.header.num_tensors = static_cast<std::uint16_t>(sizes.size());
  send.metadata.resize(sizes.size() * sizeof(std::uint64_t));
  if (!sizes.empty()) std::memcpy(send.metadata.data(), sizes.data(), send.metadata.size());
  send.segments.clear();
  send.computed = {};
  send.is_ended = false;
  std::byte* at = send.memory;
  for (const std::uint64_t bytes : sizes) {
    send.segments.push_back({at, bytes});
    at += padded_bytes(bytes);
  }
  if (at > send.memory + send.capacity_bytes) throw std::runtime_error("no room to send");
}

void DeviceRank::post(int peer, TestSend& send, const std::vector<std::uint64_t>& sizes,
                             std::uint32_t seed, std::int64_t busy_us, std::uint64_t* stamp) {
  describe(send, sizes, seed);
  if (busy_us > 0) launch_busy(stream_, busy_us);
  for (const Segment& segment : send.segments) {
    auto* words = reinterpret_cast<std::uint32_t*>(const_cast<std::byte*>(segment.data));
    launch_fill(stream_, words, segment.bytes / 4, seed++);
  }
  if (stamp != nullptr) launch_stamp(stream_, stamp);
  WordPoint computed;
  const std::string failure = timeline_->record(&computed);
  if (!failure.empty()) throw std::runtime_error(failure);
  send.computed = computed;
  transport_->post_send(peer, &send);
}

void DeviceRank::post_computed(int peer, TestSend& send,
                                      const std::vector<std::uint64_t>& sizes,
                                      std::uint32_t seed) {
  describe(send, sizes, seed);
  transport_->post_send(peer, &send);
}

bool DeviceRank::wait_ended(const TestSend& send, std::int64_t timeout_ms) {
  return wait(timeout_ms, [&send] { return send.is_ended; });
}

InboundMessage* DeviceRank::wait_arrived(std::int64_t timeout_ms) {
  if (!wait(timeout_ms, [this] { return !arrived_.empty(); })) return nullptr;
  std::lock_guard lock(mutex_);
  InboundMessage* message = arrived_.front();
  arrived_.pop_front();
  return message;
}

void DeviceRank::check_and_release(InboundMessage* message) {
  std::vector<std::uint64_t> sizes(message->header.num_tensors);
  if (!sizes.empty()) {
    std::memcpy(sizes.data(), message->metadata.data(), message->metadata.size());
  }
  if (!word_reached(message->arrived)) {
    const std::string failure = wait_word(stream_, message->arrived);
    if (!failure.empty()) throw std::runtime_error(failure);
  }
  std::byte* at = message->payload;
  auto seed = static_cast<std::uint32_t>(message->header.microbatch);
  for (const std::uint64_t bytes : sizes) {
    launch_check(stream_, reinterpret_cast<std::uint32_t*>(at), bytes / 4, seed++, num_wrong_);
    at += padded_bytes(bytes);
  }
  launch_fill(stream_, reinterpret_cast<std::uint32_t*>(message->payload),
              message->header.payload_bytes / 4, 0xdeadbeef);
  message->release(message);
}

unsigned long long DeviceRank::num_wrong() {
  require(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  return __atomic_load_n(num_wrong_, __ATOMIC_ACQUIRE);
}

bool DeviceRank::wait_lost(std::int64_t timeout_ms) {
  return wait(timeout_ms, [this] { return !lost_status_.ok(); });
}

Status DeviceRank::lost_status() {
  std::lock_guard lock(mutex_);
  return lost_status_;
}

std::size_t DeviceRank::num_headers() {
  std::lock_guard lock(mutex_);
  return num_headers_;
}

void DeviceRank::answer(RecvTicket ticket, const MessageHeader& header,
                               std::span<const std::byte> metadata) {
  InboundMessage* buffer = pool_.acquire(0);
  buffer->header = header;
  buffer->metadata.assign(metadata.begin(), metadata.end());
  transport_->post_recv(ticket, buffer);
}

void DeviceRank::on_header(RecvTicket ticket, const MessageHeader& header,
                                  std::span<const std::byte> metadata) {
  while (is_held_up) std::this_thread::yield();
  {
    std::lock_guard lock(mutex_);
    ++num_headers_;
    if (!answers_headers) kept_headers.emplace_back(ticket, header);
    changed_.notify_all();
  }
  if (answers_headers) answer(ticket, header, metadata);
}

// The transport says only that something has arrived, once for several messages.
void DeviceRank::tell_arrivals() {
  if (!on_arrival) return;
  const std::size_t count = std::erase_if(on_their_way_, word_reached);
  for (std::size_t i = 0; i < count; ++i) on_arrival(steady_now_ns());
}

void DeviceRank::on_message(std::int32_t, InboundMessage* message) {
  on_their_way_.push_back(message->arrived);
  tell_arrivals();
  std::lock_guard lock(mutex_);
  arrived_.push_back(message);
  changed_.notify_all();
}

void DeviceRank::on_arrived() { tell_arrivals(); }

void DeviceRank::on_sent(OutboundMessage* message, const Status& status) {
  std::lock_guard lock(mutex_);
  auto& send = static_cast<TestSend&>(*message);
  send.status = status;
  send.is_ended = true;
  changed_.notify_all();
}

void DeviceRank::on_peer_lost(std::int32_t, const Status& status) {
  std::lock_guard lock(mutex_);
  lost_status_ = status;
  changed_.notify_all();
}

}  // namespace rrfp::test
