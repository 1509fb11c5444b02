// All ranks of a group in this process: a sink each, and a thread that drives the transport
// where it needs one.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "transport/recording_sink.hpp"

namespace rrfp::test {

// Drives one transport as the progress thread would.
class Pump {
 public:
  explicit Pump(Transport* transport) {
    if (transport->wait_fd() < 0) return;
    thread_ = std::thread([this, transport] {
      while (!stop_) {
        if (transport->progress(steady_now_ns()) > 0) continue;
        pollfd waiting{transport->wait_fd(), POLLIN, 0};
        (void)::poll(&waiting, 1, 20);
      }
    });
  }
  ~Pump() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// One rank. The messages it posted live as long as it does.
class Member {
 public:
  Member(std::unique_ptr<Transport> transport, PayloadPlace place)
      : place_(place), sink_(place), transport_(std::move(transport)) {
    sink_.use(transport_.get());
    transport_->set_sink(&sink_);
  }
  ~Member() { leave(); }

  void start() { pump_ = std::make_unique<Pump>(transport_.get()); }
  void stop() { pump_.reset(); }
  // Destroys the transport; the record stays.
  void leave() {
    pump_.reset();
    transport_.reset();
    sink_.expect_no_more();
  }

  RecordingSink& sink() { return sink_; }
  Transport& transport() { return *transport_; }

  void send(std::int32_t peer, std::uint64_t seed, const std::vector<std::uint64_t>& sizes) {
    post(peer, std::make_unique<TestMessage>(place_, seed, sizes));
  }
  void send_control(std::int32_t peer, MessageType type, std::vector<std::byte> body = {}) {
    auto message = std::make_unique<OutboundMessage>();
    message->header.type = type;
    message->metadata = std::move(body);
    post(peer, std::move(message));
  }
  std::size_t num_posted() const { return num_posted_; }
  bool all_sends_end() {
    return eventually([this] { return sink_.num_sent() == num_posted_; });
  }

 private:
  template <class Message>
  void post(std::int32_t peer, std::unique_ptr<Message> message) {
    Message* raw = message.get();
    {
      std::lock_guard lock(mutex_);
      posted_.push_back(std::shared_ptr<OutboundMessage>(std::move(message)));
    }
    ++num_posted_;
    transport_->post_send(peer, raw);
  }

  PayloadPlace place_;
  RecordingSink sink_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<OutboundMessage>> posted_;
  std::atomic<std::size_t> num_posted_{0};
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Pump> pump_;
};

class Group {
 public:
  explicit Group(std::vector<std::unique_ptr<Transport>> transports, PayloadPlace place = {}) {
    for (auto& transport : transports) {
      members_.push_back(std::make_unique<Member>(std::move(transport), place));
    }
    for (auto& member : members_) member->start();
  }
  Member& operator[](std::size_t rank) { return *members_[rank]; }
  std::size_t size() const { return members_.size(); }

 private:
  std::vector<std::unique_ptr<Member>> members_;
};

}  // namespace rrfp::test
