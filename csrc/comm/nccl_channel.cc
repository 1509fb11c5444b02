#include "comm/nccl_channel.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <future>
#include <optional>
#include <thread>

#include "base/check.hpp"
#include "base/clock.hpp"
#include "comm/nccl_edge.hpp"
#include "device/cuda_check.hpp"

namespace rrfp {

namespace {

constexpr const char* kTag = "nccl1";
constexpr char kDigits[] = "0123456789abcdef";

std::string to_hex(const ncclUniqueId& id) {
  std::string text;
  for (const char c : id.internal) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte / 16];
    text += kDigits[byte % 16];
  }
  return text;
}

// The identifier that `address` holds for `target`: "nccl1:<target>,<hex>:<target>,<hex>...".
std::optional<ncclUniqueId> find_id(const std::string& address, std::int32_t target) {
  ncclUniqueId id{};
  const std::string before = ":" + std::to_string(target) + ",";
  const std::size_t at = address.find(before);
  const std::size_t digits = 2 * sizeof id.internal;
  if (address.rfind(kTag, 0) != 0 || at == std::string::npos ||
      address.size() < at + before.size() + digits) {
    return std::nullopt;
  }
  const char* text = address.data() + at + before.size();
  for (std::size_t i = 0; i < sizeof id.internal; ++i) {
    const char* high = std::strchr(kDigits, text[2 * i]);
    const char* low = std::strchr(kDigits, text[2 * i + 1]);
    if (high == nullptr || low == nullptr) return std::nullopt;
    id.internal[i] = static_cast<char>((high - kDigits) * 16 + (low - kDigits));
  }
  return id;
}

using EdgeEnds = std::vector<std::unique_ptr<NcclEdgeEnd>>;

class NcclChannel final : public DataChannel {
 public:
  explicit NcclChannel(std::shared_ptr<EdgeEnds> ends) : ends_(std::move(ends)) {}
  ~NcclChannel() override {
    // All at once: an abort takes half a second.
    for (const auto& end : *ends_) end->start_abort();
  }

  const char* name() const override { return "nccl"; }
  bool needs_go() const override { return true; }
  bool open_recv(std::int32_t, const ReceiveSlot&, GrantBody*, WordPoint*) override {
    return true;
  }
  bool can_start_recv(std::int32_t peer) override { return is_free(find(peer, false)); }
  std::string start_recv(std::int32_t peer, std::span<const std::uint64_t> segment_bytes,
                         std::byte* target, WordPoint* arrived) override {
    return find(peer, false)->recv(segment_bytes, target, arrived);
  }
  void close_recv(std::int32_t, const WordPoint&) override {}
  bool can_start_send(std::int32_t peer) override { return is_free(find(peer, true)); }
  std::string start_send(std::int32_t peer, const OutboundMessage& message, const GrantBody&,
                         WordPoint* sent) override {
    return find(peer, true)->send(message.segments, sent);
  }
  std::string check_device() override {
    for (const auto& end : *ends_) {
      std::string failure = end->check();
      if (!failure.empty()) return failure;
    }
    return {};
  }
  void stop(std::int32_t peer) override {
    for (const auto& end : *ends_) {
      if (end->peer() == peer) end->start_abort();
    }
  }
  void let_go(std::int32_t) override {}
  bool has_settled_send(std::int32_t peer, const WordPoint&) override {
    return is_aborted(find(peer, true));
  }
  bool has_settled_recv(std::int32_t peer) override { return is_aborted(find(peer, false)); }

 private:
  NcclEdgeEnd* find(std::int32_t peer, bool is_source) {
    for (const auto& end : *ends_) {
      if (end->peer() == peer && end->is_source() == is_source) return end.get();
    }
    return nullptr;
  }
  static bool is_free(const NcclEdgeEnd* end) { return end != nullptr && end->is_idle(); }
  static bool is_aborted(const NcclEdgeEnd* end) { return end == nullptr || end->is_aborted(); }

  std::shared_ptr<EdgeEnds> ends_;
};

// Shared with the set-up thread, which may outlive the call.
struct Connecting {
  std::shared_ptr<EdgeEnds> ends = std::make_shared<EdgeEnds>();
  std::vector<ncclUniqueId> ids;
  std::atomic<std::size_t> num_connected{0};
  std::promise<std::string> failure;
};

std::string edge_text(const NcclEdgeEnd& end, std::int32_t rank) {
  const std::string own = std::to_string(rank);
  const std::string other = std::to_string(end.peer());
  return end.is_source() ? "from rank " + own + " to rank " + other
                         : "from rank " + other + " to rank " + own;
}

void connect_all(const std::shared_ptr<Connecting>& connecting, std::int32_t rank) {
  for (std::size_t i = 0; i < connecting->ends->size(); ++i) {
    NcclEdgeEnd& end = *(*connecting->ends)[i];
    std::string failure = end.connect(connecting->ids[i]);
    if (!failure.empty()) {
      connecting->failure.set_value("the NCCL edge " + edge_text(end, rank) + ": " + failure);
      return;
    }
    connecting->num_connected.fetch_add(1, std::memory_order_relaxed);  // for words only
  }
  connecting->failure.set_value({});
}

// Waits for the set-up thread; empty when all edges stand.
std::string wait_connected(Connecting& connecting, const NcclSetup& setup, std::int32_t rank) {
  std::future<std::string> failure = connecting.failure.get_future();
  const std::int64_t deadline_ns = steady_now_ns() + setup.timeout_ms * 1000000;
  while (failure.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
    const bool is_interrupted = setup.interrupted && setup.interrupted();
    if (!is_interrupted && steady_now_ns() < deadline_ns) continue;
    // Frees a first message that waits for its peer; not a communicator being initialised.
    for (const auto& end : *connecting.ends) end->start_abort();
    const auto at = connecting.num_connected.load(std::memory_order_relaxed);  // words only
    if (is_interrupted) return "the set-up of the NCCL edges was interrupted";
    return "the NCCL edge " +
           (at < connecting.ends->size() ? edge_text(*(*connecting.ends)[at], rank)
                                         : std::string("(all were there)")) +
           " did not come up within " + std::to_string(setup.timeout_ms) +
           " ms; look at that rank, or at what NCCL_DEBUG set to INFO prints";
  }
  return failure.get();
}

}  // namespace

NcclEndpoint::NcclEndpoint(std::int32_t rank, std::vector<NcclEdge> edges, int device)
    : rank_(rank), device_(device), edges_(std::move(edges)), address_(kTag) {
  const char* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  RRFP_CHECK(connections == nullptr || std::string(connections) != "1",
             "NCCL messages beside other collectives hang when CUDA_DEVICE_MAX_CONNECTIONS is 1; "
             "unset it (the default is 8), or use the ipc transport, which works with it");
  std::string refusal;
  const NcclLibrary* library = nccl_library(&refusal);
  RRFP_CHECK(library != nullptr, refusal);
  std::sort(edges_.begin(), edges_.end());
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  for (const NcclEdge& edge : edges_) {
    if (edge.source != rank) continue;
    ncclUniqueId id{};
    const std::string failure =
        nccl_words(*library, library->get_unique_id(&id), "ncclGetUniqueId");
    RRFP_CHECK(failure.empty(), failure);
    address_ += ":" + std::to_string(edge.target) + "," + to_hex(id);
  }
}

std::unique_ptr<DataChannel> open_nccl_channel(const NcclEndpoint& endpoint,
                                               const NcclSetup& setup, std::string* refusal) {
  const NcclLibrary* library = nccl_library(refusal);
  if (library == nullptr) return nullptr;
  auto connecting = std::make_shared<Connecting>();
  const std::int32_t rank = endpoint.rank();
  for (const NcclEdge& edge : endpoint.edges()) {
    if (edge.source != rank && edge.target != rank) continue;
    const std::string& address = setup.addresses[static_cast<std::size_t>(edge.source)];
    const std::optional<ncclUniqueId> id = find_id(address, edge.target);
    if (!id) {
      *refusal = "rank " + std::to_string(edge.source) + " published no NCCL identifier for the "
                 "edge to rank " + std::to_string(edge.target);
      return nullptr;
    }
    connecting->ids.push_back(*id);
    try {
      connecting->ends->push_back(std::make_unique<NcclEdgeEnd>(
          *library, endpoint.device(), edge.source == rank,
          edge.source == rank ? edge.target : edge.source));
    } catch (const DeviceError& error) {
      *refusal = error.what();
      return nullptr;
    }
  }
  std::thread thread(connect_all, connecting, rank);
  *refusal = wait_connected(*connecting, setup, rank);
  if (refusal->empty()) {
    thread.join();
    return std::make_unique<NcclChannel>(connecting->ends);
  }
  thread.detach();  // it holds what it uses
  return nullptr;
}

}  // namespace rrfp
