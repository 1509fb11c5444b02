#include "comm/ipc_channel.hpp"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.hpp"
#include "comm/ipc_address.hpp"
#include "device/cuda_check.hpp"
#include "device/handover.hpp"
#include "device/stream_timeline.hpp"

namespace rrfp {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(GrantBody::slab_handle));

namespace {

std::string export_slab(const ReceiveMemory& memory, std::uint32_t slab_index, std::byte* handle) {
  cudaIpcMemHandle_t exported{};
  DeviceGuard guard(memory.device());
  const cudaError_t result = cudaIpcGetMemHandle(&exported, memory.slab_base(slab_index));
  std::memcpy(handle, &exported, sizeof exported);
  return result == cudaSuccess ? std::string()
                               : cuda_words(result, "cudaIpcGetMemHandle", memory.device());
}

class IpcChannel final : public DataChannel {
 public:
  IpcChannel(std::unique_ptr<IpcEndpoint> endpoint, std::size_t num_ranks, bool follows_streams)
      : endpoint_(std::move(endpoint)), follows_streams_(follows_streams), peers_(num_ranks) {}
  ~IpcChannel() override;

  std::string connect(std::int32_t peer, const std::string& text);

  const char* name() const override { return "ipc"; }
  bool needs_go() const override { return false; }
  bool follows_streams(std::int32_t peer) const override {
    return follows_streams_ && !peers_[static_cast<std::size_t>(peer)].is_same_process;
  }
  bool open_recv(std::int32_t peer, const ReceiveSlot& slot, GrantBody* grant,
                 WordPoint* arrived) override;
  bool can_start_recv(std::int32_t) override { return true; }
  std::string start_recv(std::int32_t, std::span<const std::uint64_t>, std::byte*,
                         WordPoint*) override {
    return "a copy engine's message needs no start at its receiver";
  }
  void close_recv(std::int32_t peer, const WordPoint& arrived) override;
  bool can_start_send(std::int32_t) override { return true; }
  std::string start_send(std::int32_t peer, const OutboundMessage& message,
                         const GrantBody& grant, WordPoint* sent) override;
  std::string check_device() override;
  void stop(std::int32_t) override {}  // a copy cannot be called back
  void let_go(std::int32_t peer) override;
  bool has_settled_send(std::int32_t peer, const WordPoint& point) override;
  bool has_settled_recv(std::int32_t peer) override;

 private:
  struct Peer {
    bool is_same_process = false;
    cudaStream_t stream = nullptr;
    // Says what has been sent. The words of the page do not: a receiver that gives up reaches
    // them itself.
    std::unique_ptr<StreamTimeline> sent;
    IpcSegment segment;                      // the page for this rank in the peer's segment
    std::uint32_t* words_on_device = nullptr;
    const std::uint32_t* own_words_on_device = nullptr;  // of the page that the peer writes
    std::vector<std::byte*> slabs;           // of the peer, as mapped here; null: not yet
    std::vector<std::uint32_t> free_words;   // receiver: words of the peer's page here
    std::uint32_t next_value = 1;
  };

  int device() const { return endpoint_->device(); }
  Peer& peer_of(std::int32_t rank) { return peers_[static_cast<std::size_t>(rank)]; }
  IpcPage* own_page(std::int32_t peer) const { return endpoint_->segment().page(peer); }
  std::string map_slab(Peer& peer, std::uint32_t slab_index, std::uint64_t address,
                       const std::byte* handle);
  void unmap_slabs(Peer& peer);

  std::unique_ptr<IpcEndpoint> endpoint_;
  const bool follows_streams_;
  std::vector<Peer> peers_;
  std::vector<std::array<std::byte, 64>> exported_;  // handles of own slabs, by index
};

}  // namespace

IpcEndpoint::IpcEndpoint(std::int32_t rank, std::int32_t num_ranks, int device,
                         std::uint64_t slab_bytes)
    : rank_(rank), memory_(ReceiveMemory::create(device, slab_bytes)) {
  IpcAddress address;
  address.host = host_boot_id();
  address.process = process_nonce();
  address.pid = getpid();
  address.nonce = random_nonce();
  address.device = device;
  segment_ = IpcSegment::create(num_ranks, address.nonce);
  address.fd = segment_.fd();
  address.slab_address = reinterpret_cast<std::uint64_t>(memory_->slab_base(0));
  const std::string failure = export_slab(*memory_, 0, address.slab_handle.data());
  if (!failure.empty()) throw DeviceError(failure);
  address_ = address.to_text();
}

std::unique_ptr<DataChannel> open_ipc_channel(std::unique_ptr<IpcEndpoint> endpoint,
                                              const std::vector<std::string>& addresses,
                                              bool follows_streams, std::string* refusal) {
  const std::int32_t rank = endpoint->rank();
  auto channel =
      std::make_unique<IpcChannel>(std::move(endpoint), addresses.size(), follows_streams);
  for (std::int32_t peer = 0; peer < static_cast<std::int32_t>(addresses.size()); ++peer) {
    if (peer == rank) continue;
    const std::string what = channel->connect(peer, addresses[static_cast<std::size_t>(peer)]);
    if (what.empty()) continue;
    *refusal = "rank " + std::to_string(rank) + " cannot copy to the device of rank " +
               std::to_string(peer) + " directly: " + what;
    return nullptr;
  }
  return channel;
}

std::string IpcChannel::connect(std::int32_t peer_rank, const std::string& text) {
  const std::optional<IpcAddress> address = parse_ipc_address(text);
  if (!address) return "its address is \"" + text.substr(0, 40) + "\"";
  if (address->host != host_boot_id()) return "it runs on another host";
  Peer& peer = peer_of(peer_rank);
  peer.is_same_process = address->pid == getpid() && address->process == process_nonce();
  std::string refusal;
  peer.segment =
      IpcSegment::open(address->pid, address->fd, endpoint_->rank(), address->nonce, &refusal);
  if (!peer.segment.is_valid()) return refusal;
  try {
    DeviceGuard guard(device());
    IpcPage* page = peer.segment.page(0);
    cuda_require(cudaHostRegister(page, kIpcPageBytes, cudaHostRegisterMapped),
                 "cudaHostRegister", device());
    peer.words_on_device = device_address(page->words);
    if (follows_streams(peer_rank)) {
      IpcPage* own = own_page(peer_rank);
      cuda_require(cudaHostRegister(own, kIpcPageBytes, cudaHostRegisterMapped),
                   "cudaHostRegister", device());
      peer.own_words_on_device = device_address(own->words);
    }
    if (peer.is_same_process) connect_devices(device(), address->device);
    int least = 0;
    int greatest = 0;
    cuda_require(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                 "cudaDeviceGetStreamPriorityRange", device());
    cuda_require(cudaStreamCreateWithPriority(&peer.stream, cudaStreamNonBlocking, greatest),
                 "cudaStreamCreateWithPriority", device());
    peer.sent = std::make_unique<StreamTimeline>(device(), peer.stream);
  } catch (const DeviceError& error) {
    return error.what();
  }
  for (std::uint32_t word = kIpcWords; word > 0; --word) peer.free_words.push_back(word - 1);
  return map_slab(peer, 0, address->slab_address, address->slab_handle.data());
}

IpcChannel::~IpcChannel() {
  DeviceGuard guard(device());
  for (Peer& peer : peers_) {
    peer.sent.reset();
    if (peer.stream != nullptr) cudaStreamDestroy(peer.stream);
    unmap_slabs(peer);
    if (peer.words_on_device != nullptr) cudaHostUnregister(peer.segment.page(0));
    if (peer.own_words_on_device != nullptr) {
      cudaHostUnregister(own_page(static_cast<std::int32_t>(&peer - peers_.data())));
    }
  }
}

std::string IpcChannel::map_slab(Peer& peer, std::uint32_t slab_index, std::uint64_t address,
                                 const std::byte* handle) {
  // A rank makes few slabs: an index far out is not one of its own.
  if (slab_index > peer.slabs.size() + 64) return "a slab number that no rank would give";
  if (peer.slabs.size() <= slab_index) peer.slabs.resize(slab_index + 1, nullptr);
  if (peer.slabs[slab_index] != nullptr) return {};
  if (peer.is_same_process) {
    peer.slabs[slab_index] = reinterpret_cast<std::byte*>(address);
    peer.segment.page(0)->num_mapped.fetch_add(1, std::memory_order_release);  // I1
    return {};
  }
  DeviceGuard guard(device());
  cudaIpcMemHandle_t exported{};
  std::memcpy(&exported, handle, sizeof exported);
  void* base = nullptr;
  const cudaError_t result =
      cudaIpcOpenMemHandle(&base, exported, cudaIpcMemLazyEnablePeerAccess);
  if (result != cudaSuccess) return cuda_words(result, "cudaIpcOpenMemHandle", device());
  peer.slabs[slab_index] = static_cast<std::byte*>(base);
  peer.segment.page(0)->num_mapped.fetch_add(1, std::memory_order_release);  // I1
  return {};
}

void IpcChannel::unmap_slabs(Peer& peer) {
  DeviceGuard guard(device());
  for (std::byte* slab : peer.slabs) {
    if (slab != nullptr && !peer.is_same_process) cudaIpcCloseMemHandle(slab);
  }
  peer.slabs.clear();
  if (!peer.segment.is_valid()) return;
  peer.segment.page(0)->num_mapped.store(0, std::memory_order_release);  // I1
}

bool IpcChannel::open_recv(std::int32_t peer_rank, const ReceiveSlot& slot, GrantBody* grant,
                           WordPoint* arrived) {
  Peer& peer = peer_of(peer_rank);
  if (peer.free_words.empty()) return false;
  while (exported_.size() <= slot.slab_index) {
    // A handle that cannot be made is refused by the sender's device, which says so there.
    const auto index = static_cast<std::uint32_t>(exported_.size());
    export_slab(*endpoint_->memory(), index, exported_.emplace_back().data());
  }
  grant->slab_index = slot.slab_index;
  grant->slab_offset = slot.slab_offset;
  grant->slab_address =
      reinterpret_cast<std::uint64_t>(endpoint_->memory()->slab_base(slot.slab_index));
  std::memcpy(grant->slab_handle, exported_[slot.slab_index].data(), sizeof grant->slab_handle);
  grant->word_index = peer.free_words.back();
  grant->word_value = peer.next_value++;
  peer.free_words.pop_back();
  // The word may show an older number, never a later one.
  *arrived = {&own_page(peer_rank)->words[grant->word_index], grant->word_value,
              peer.own_words_on_device == nullptr
                  ? nullptr
                  : peer.own_words_on_device + grant->word_index};
  return true;
}

void IpcChannel::close_recv(std::int32_t peer_rank, const WordPoint& arrived) {
  const std::uint32_t* first = own_page(peer_rank)->words;
  peer_of(peer_rank).free_words.push_back(static_cast<std::uint32_t>(arrived.word - first));
}

std::string IpcChannel::start_send(std::int32_t peer_rank, const OutboundMessage& message,
                                   const GrantBody& grant, WordPoint* sent) {
  Peer& peer = peer_of(peer_rank);
  if (grant.word_index >= kIpcWords) return "a grant names a word outside its page";
  std::string refusal =
      map_slab(peer, grant.slab_index, grant.slab_address, grant.slab_handle);
  if (!refusal.empty()) return refusal;
  DeviceGuard guard(device());
  if (!word_reached(message.computed)) {
    refusal = wait_word(peer.stream, message.computed);
    if (!refusal.empty()) return refusal;
  }
  std::byte* target = peer.slabs[grant.slab_index] + grant.slab_offset;
  for (const Segment& segment : message.segments) {
    if (segment.bytes > 0) {
      const cudaError_t result = cudaMemcpyAsync(target, segment.data, segment.bytes,
                                                 cudaMemcpyDefault, peer.stream);
      if (result != cudaSuccess) return cuda_words(result, "cudaMemcpyAsync", device());
    }
    target += padded_bytes(segment.bytes);
  }
  refusal = write_word(peer.stream, peer.words_on_device + grant.word_index, grant.word_value);
  return refusal.empty() ? peer.sent->record(sent) : refusal;
}

std::string IpcChannel::check_device() {
  DeviceGuard guard(device());
  for (const Peer& peer : peers_) {
    if (peer.stream == nullptr) continue;
    const cudaError_t result = cudaStreamQuery(peer.stream);
    if (result == cudaSuccess || result == cudaErrorNotReady) continue;
    return cuda_words(result, "cudaStreamQuery", device());
  }
  return {};
}

// Copies run to their end whatever becomes of the receiver.
bool IpcChannel::has_settled_send(std::int32_t, const WordPoint& point) {
  return word_reached(point);
}

void IpcChannel::let_go(std::int32_t peer_rank) { unmap_slabs(peer_of(peer_rank)); }

bool IpcChannel::has_settled_recv(std::int32_t peer_rank) {
  return own_page(peer_rank)->num_mapped.load(std::memory_order_acquire) == 0;  // I1
}

}  // namespace rrfp
