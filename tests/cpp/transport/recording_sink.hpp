// A sink that checks every message it gets and remembers what happened, for the transport tests.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/payload_pool.hpp"
#include "comm/transport.hpp"
#include "transport/test_message.hpp"

namespace rrfp::test {

// True as soon as `fact` holds; false when it does not within a time that only a hang exceeds.
inline bool eventually(const std::function<bool()>& fact, int limit_s = 30) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(limit_s);
  while (!fact()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

class RecordingSink final : public MessageSink {
  // One call of the transport, from begin to end.
  struct Call {
    explicit Call(RecordingSink& sink) : sink_(sink) {}
    ~Call() {
      if (sink_.is_over_) ++sink_.num_late_calls_;
    }
    RecordingSink& sink_;
  };

  template <class Function>
  auto read(Function function) const {
    std::lock_guard lock(mutex_);
    return function();
  }
  template <class Function>
  void change(Function function) {
    std::lock_guard lock(mutex_);
    function();
  }

 public:
  struct Header {
    RecvTicket ticket;
    MessageHeader header;
    std::vector<std::byte> metadata;
  };
  struct Control {
    std::int32_t peer;
    MessageHeader header;
    std::vector<std::byte> body;
  };
  struct Loss {
    std::int32_t peer;
    Status status;
  };
  struct Record {
    std::vector<Header> held;
    std::vector<Control> controls;
    std::vector<Loss> losses;
    std::vector<std::string> defects;
    std::vector<Status> bad_sends;
    std::vector<std::uint64_t> seeds;  // of messages received, in order
    std::size_t num_sent = 0;          // on_sent() calls
  };

  explicit RecordingSink(PayloadPlace place = {}) : place_(place) {}

  // The transport is destroyed: whatever still enters or leaves this sink is too late.
  void expect_no_more() { is_over_ = true; }
  std::size_t num_late_calls() const { return num_late_calls_; }
  void use(Transport* transport) { transport_ = transport; }

  // Peers whose headers are kept instead of answered.
  void hold(std::int32_t peer) { change([&] { held_peers_.push_back(peer); }); }
  void hold_no_more() { change([&] { held_peers_.clear(); }); }
  void answer(const Header& header) {
    const bool on_device = header.header.place == MemoryPlace::kDevice;
    InboundMessage* buffer = pool_.acquire(on_device ? 0 : header.header.payload_bytes);
    buffer->header = header.header;
    buffer->metadata.assign(header.metadata.begin(), header.metadata.end());
    transport_->post_recv(header.ticket, buffer);
  }

  Record record() const {
    std::lock_guard lock(mutex_);
    return record_;
  }
  std::size_t num_sent() const { return read([&] { return record_.num_sent; }); }
  std::size_t num_received() const { return read([&] { return record_.seeds.size(); }); }
  std::size_t num_held() const { return read([&] { return record_.held.size(); }); }
  std::size_t num_controls() const { return read([&] { return record_.controls.size(); }); }
  std::size_t num_losses() const { return read([&] { return record_.losses.size(); }); }
  const PayloadPool& pool() const { return pool_; }

  void on_header(RecvTicket ticket, const MessageHeader& header,
                 std::span<const std::byte> metadata) override {
    const Call call(*this);
    Header kept{ticket, header, {metadata.begin(), metadata.end()}};
    const bool held = read([&] {
      return std::find(held_peers_.begin(), held_peers_.end(), ticket.peer) != held_peers_.end();
    });
    if (!held) return answer(kept);
    change([&] { record_.held.push_back(std::move(kept)); });
  }
  void on_message(std::int32_t, InboundMessage* message) override {
    const Call call(*this);
    const std::string defect = content_defect(place_, *message);
    change([&] {
      record_.seeds.push_back(word_at(message->metadata, 0));
      if (!defect.empty()) record_.defects.push_back(defect);
    });
    const std::vector<std::byte> poison(message->header.payload_bytes, std::byte{0xee});
    if (!poison.empty()) place_.write(message->payload, poison.data(), poison.size());
    message->release(message);
  }
  void on_sent(OutboundMessage* message, const Status& status) override {
    const Call call(*this);
    if (message->header.type == MessageType::kData) static_cast<TestMessage*>(message)->poison();
    change([&] {
      ++record_.num_sent;
      if (!status.ok()) record_.bad_sends.push_back(status);
    });
  }
  void on_control(std::int32_t peer, const MessageHeader& header,
                  std::span<const std::byte> body) override {
    const Call call(*this);
    change([&] { record_.controls.push_back({peer, header, {body.begin(), body.end()}}); });
  }
  void on_peer_lost(std::int32_t peer, const Status& status) override {
    const Call call(*this);
    change([&] { record_.losses.push_back({peer, status}); });
  }

 private:
  PayloadPlace place_;
  PayloadPool pool_;
  Transport* transport_ = nullptr;
  std::atomic<bool> is_over_{false};
  std::atomic<std::size_t> num_late_calls_{0};
  mutable std::mutex mutex_;
  Record record_;
  std::vector<std::int32_t> held_peers_;
};

}  // namespace rrfp::test
