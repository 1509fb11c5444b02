#include "python/device_link.hpp"

#include <algorithm>
#include <random>
#include <thread>

#include "base/check.hpp"
#include "comm/device_transport.hpp"
#include "comm/ipc_channel.hpp"
#include "comm/nccl_channel.hpp"
#include "comm/socket_transport.hpp"
#include "device/cuda_check.hpp"
#include "device/cuda_support.hpp"
#include "python/status_error.hpp"

namespace rrfp::python {

namespace {

StatusError device_failure(std::int32_t rank, const std::string& what) {
  return StatusError(
      {StatusCode::kDeviceFailed, rank, "rank " + std::to_string(rank) + ": " + what});
}

void require_device(std::int32_t rank, int device) {
  const CudaSupport support = cuda_support();
  if (!support.refusal.empty()) throw device_failure(rank, support.refusal);
  if (device < 0 || device >= support.num_devices) {
    throw device_failure(rank, "there is no device " + std::to_string(device) +
                                   "; this process sees " + std::to_string(support.num_devices));
  }
}

class CudaStream final : public ComputeStream {
 public:
  explicit CudaStream(int device) : device_(device) {}

  int device() const override { return device_; }
  void attach(DeviceTransport* transport) { transport_ = transport; }

  std::string bind(void* stream) override {
    try {
      transport_->bind_reader(stream);
      const auto found = std::find_if(timelines_.begin(), timelines_.end(),
                                      [stream](const auto& t) { return t->stream() == stream; });
      if (found == timelines_.end()) {
        timelines_.push_back(std::make_unique<StreamTimeline>(device_, stream));
        current_ = timelines_.back().get();
      } else {
        current_ = found->get();
      }
    } catch (const DeviceError& error) {
      return error.what();
    }
    return {};
  }

  void begin_task() override { transport_->begin_task(); }
  void end_task() override { transport_->end_task(); }

  std::string record(WordPoint* point) override {
    RRFP_INVARIANT(current_ != nullptr, "a point was asked for before a stream was bound");
    return current_->record(point);
  }

  std::string wait(const WordPoint& point) override {
    DeviceGuard guard(device_);
    return wait_word(current_->stream(), point);
  }

 private:
  const int device_;
  DeviceTransport* transport_ = nullptr;
  StreamTimeline* current_ = nullptr;
  std::vector<std::unique_ptr<StreamTimeline>> timelines_;  // kept: points outlive a change
};

DeviceRank put_together(int device, std::unique_ptr<Transport> control,
                        std::unique_ptr<DataChannel> channel,
                        std::shared_ptr<ReceiveMemory> memory, std::int64_t held_up_ms) {
  auto stream = std::make_unique<CudaStream>(device);
  auto transport = std::make_unique<DeviceTransport>(std::move(control), std::move(channel),
                                                     std::move(memory), held_up_ms);
  stream->attach(transport.get());
  return {std::move(stream), std::move(transport)};
}

class IpcLink final : public DeviceLink {
 public:
  IpcLink(std::int32_t rank, std::int32_t num_ranks, int device, bool follows_streams)
      : device_(device),
        follows_streams_(follows_streams),
        endpoint_(std::make_unique<IpcEndpoint>(rank, num_ranks, device,
                                                ReceiveMemory::kDefaultSlabBytes)),
        memory_(endpoint_->memory()),
        address_(endpoint_->address()) {}

  const std::string& address() const override { return address_; }

  std::string open(const std::vector<std::string>& addresses, std::int64_t,
                   const std::function<bool()>&) override {
    std::string refusal;
    channel_ = open_ipc_channel(std::move(endpoint_), addresses, follows_streams_, &refusal);
    return refusal;
  }

  DeviceRank join(std::unique_ptr<Transport> control, std::int64_t held_up_ms) override {
    return put_together(device_, std::move(control), std::move(channel_), memory_, held_up_ms);
  }

 private:
  const int device_;
  const bool follows_streams_;
  std::unique_ptr<IpcEndpoint> endpoint_;
  std::shared_ptr<ReceiveMemory> memory_;
  const std::string address_;
  std::unique_ptr<DataChannel> channel_;
};

class NcclLink final : public DeviceLink {
 public:
  NcclLink(std::int32_t rank, std::vector<NcclEdge> edges, int device)
      : endpoint_(rank, std::move(edges), device),
        memory_(ReceiveMemory::create(device, ReceiveMemory::kDefaultSlabBytes)) {}

  const std::string& address() const override { return endpoint_.address(); }

  std::string open(const std::vector<std::string>& addresses, std::int64_t timeout_ms,
                   const std::function<bool()>& interrupted) override {
    std::string refusal;
    channel_ = open_nccl_channel(endpoint_, {addresses, timeout_ms, interrupted}, &refusal);
    return refusal;
  }

  DeviceRank join(std::unique_ptr<Transport> control, std::int64_t held_up_ms) override {
    return put_together(endpoint_.device(), std::move(control), std::move(channel_), memory_,
                        held_up_ms);
  }

 private:
  NcclEndpoint endpoint_;
  std::shared_ptr<ReceiveMemory> memory_;
  std::unique_ptr<DataChannel> channel_;
};

// Every rank's control connections, each made on a thread of its own because they meet.
std::vector<std::unique_ptr<Transport>> connect_threads(std::int32_t num_ranks, std::uint64_t run,
                                                        std::int64_t timeout_ms) {
  std::vector<SocketListener> listeners(static_cast<std::size_t>(num_ranks));
  SocketSetup setup;
  setup.run = run;
  setup.timeout_ms = timeout_ms;
  std::random_device random;
  for (std::byte& byte : setup.token) byte = static_cast<std::byte>(random());
  for (const SocketListener& listener : listeners) setup.addresses.push_back(listener.address());
  std::vector<std::unique_ptr<Transport>> transports(listeners.size());
  std::vector<Status> failures(listeners.size());
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      SocketSetup own = setup;
      own.rank = rank;
      const auto at = static_cast<std::size_t>(rank);
      try {
        transports[at] = connect_sockets(listeners[at], own, &failures[at]);
      } catch (const std::exception& error) {
        failures[at] = {StatusCode::kTimedOut, rank, error.what()};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& failure : failures) {
    if (!failure.ok()) throw StatusError(failure);
  }
  return transports;
}

}  // namespace

std::unique_ptr<DeviceLink> make_ipc_link(std::int32_t rank, std::int32_t num_ranks, int device,
                                          bool follows_streams) {
  require_device(rank, device);
  try {
    return std::make_unique<IpcLink>(rank, num_ranks, device, follows_streams);
  } catch (const DeviceError& error) {
    throw device_failure(rank, error.what());
  }
}

std::unique_ptr<DeviceLink> make_nccl_link(
    std::int32_t rank, const std::vector<std::pair<std::int32_t, std::int32_t>>& edges,
    int device) {
  require_device(rank, device);
  std::vector<NcclEdge> directed;
  for (const auto& [source, target] : edges) directed.push_back({source, target});
  try {
    return std::make_unique<NcclLink>(rank, std::move(directed), device);
  } catch (const DeviceError& error) {
    throw device_failure(rank, error.what());
  }
}

std::vector<DeviceRank> make_device_ranks(const std::vector<int>& devices, std::uint64_t run,
                                          std::int64_t timeout_ms,
                                          std::int64_t peer_timeout_ms) {
  const auto num_ranks = static_cast<std::int32_t>(devices.size());
  std::vector<std::unique_ptr<DeviceLink>> links;
  std::vector<std::string> addresses;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    links.push_back(
        make_ipc_link(rank, num_ranks, devices[static_cast<std::size_t>(rank)], false));
    addresses.push_back(links.back()->address());
  }
  std::vector<std::unique_ptr<Transport>> controls = connect_threads(num_ranks, run, timeout_ms);
  std::vector<DeviceRank> ranks;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    const std::string refusal =
        links[static_cast<std::size_t>(rank)]->open(addresses, timeout_ms, {});
    if (!refusal.empty()) {
      throw device_failure(rank, refusal + ". Use one process for each GPU, with transport nccl");
    }
  }
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    ranks.push_back(links[at]->join(std::move(controls[at]), peer_timeout_ms));
  }
  return ranks;
}

}  // namespace rrfp::python
