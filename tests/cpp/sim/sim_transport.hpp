// SimTransport: one rank's end of a SimNetwork, behind the interface of the real transports.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sim_network.hpp"

namespace rrfp::test {

class SimTransport final : public Transport {
 public:
  SimTransport(SimNetwork& network, std::int32_t rank) : network_(network), rank_(rank) {
    network_.endpoints[rank].transport = this;
  }
  ~SimTransport() override {
    abort({StatusCode::kClosed, rank_, "closed"});
    if (network_.endpoints[rank_].transport == this) network_.endpoints[rank_].transport = nullptr;
  }

  const char* name() const override { return "sim"; }
  std::int32_t rank() const override { return rank_; }
  std::int32_t num_ranks() const override {
    return static_cast<std::int32_t>(network_.endpoints.size());
  }
  bool shares_address_space() const override { return false; }
  void set_sink(MessageSink* sink) override { sink_ = sink; }
  std::size_t progress(std::int64_t) override { return 0; }
  int wait_fd() const override { return -1; }

  void post_send(std::int32_t peer, OutboundMessage* message) override {
    message->peer = peer;
    SimNetwork::Link& link = network_.link(rank_, peer);
    if (is_closed_ || link.is_broken) {
      return sink_->on_sent(message, {StatusCode::kPeerLost, peer, "no connection"});
    }
    MessageHeader& header = message->header;
    header.run = kSimRun;
    header.source_rank = rank_;
    header.metadata_bytes = static_cast<std::uint32_t>(message->metadata.size());
    header.payload_bytes = total_payload_bytes(*message);
    if (network_.model.computed_early_ns > 0) {
      header.computed_us = to_short_us(virtual_ns() - network_.model.computed_early_ns);
    }
    auto packet = std::make_shared<SimPacket>(SimPacket{header, message->metadata, {}, false, 0,
                                                        message});
    packet->payload.resize(header.payload_bytes);
    copy_segments(*message, packet->payload.data());
    posted_.insert(message);
    const bool is_data = header.type == MessageType::kData;
    const bool strikes = is_data && is_of_a_message(network_.model.fault.kind) &&
                         network_.model.fault.rank == rank_ &&
                         num_data_++ == network_.model.fault.nth;
    if (strikes) network_.fault_ns = virtual_ns();
    send(peer, packet, strikes && network_.model.fault.kind != FaultKind::kAgain, 0);
    if (!strikes || network_.model.fault.kind != FaultKind::kAgain) return;
    auto again = std::make_shared<SimPacket>(*packet);
    again->source = nullptr;
    send(peer, again, false, network_.model.fault.late_ns);
  }

  void post_recv(RecvTicket ticket, InboundMessage* buffer) override {
    buffer->pool_release = buffer->release;
    buffer->release = &release_counted;
    ++network_.live_buffers;
    buffer->payload_owner = &network_.live_buffers;
    auto packet = std::exchange(offered_, nullptr);
    if (ticket.id != 0 || packet == nullptr) std::abort();  // it is answered at once
    SimNetwork* network = &network_;
    network_.reach(rank_, packet->payload_ns, [=, this, alive = alive_] {
      if (!*alive) {
        buffer->release(buffer);
        return give_back(*network, ticket.peer, packet->source);
      }
      // A header that was changed under way, and taken all the same, may have asked for less, or
      // for none on the host.
      if (buffer->payload != nullptr) {
        std::copy_n(packet->payload.begin(),
                    std::min<std::size_t>(packet->payload.size(), buffer->header.payload_bytes),
                    buffer->payload);
      }
      if (network_.model.computed_early_ns == kOnArrival) {
        buffer->header.computed_us = to_short_us(virtual_ns());
      }
      if (network_.model.stale_is_current) buffer->header.step = network_.endpoints[rank_].step;
      sink_->on_message(ticket.peer, buffer);
      give_back(*network, ticket.peer, packet->source);
    });
  }

  void abort(const Status& status) override {
    is_closed_ = true;
    for (OutboundMessage* message : std::exchange(posted_, {})) sink_->on_sent(message, status);
    *alive_ = false;
  }

  void lose(std::int32_t peer, const Status& status) {
    if (!is_closed_ && lost_.insert(peer).second) sink_->on_peer_lost(peer, status);
  }

  // The other side has it, or never will.
  void sent(OutboundMessage* message, const Status& status) {
    if (posted_.erase(message) > 0) sink_->on_sent(message, status);
  }

 private:
  void send(std::int32_t peer, std::shared_ptr<SimPacket> packet, bool is_spoilt,
            std::int64_t late_ns) {
    NetworkModel& model = network_.model;
    SimNetwork::Link& link = network_.link(rank_, peer);
    MessageHeader& header = packet->header;
    header.sequence = link.sent++;
    const bool is_farewell =
        header.type == MessageType::kAbort || header.type == MessageType::kBye;
    const bool is_data = header.type == MessageType::kData;
    const std::int64_t latency_ns = model.control_latency_ns();
    link.latest_header_ns = std::max(link.latest_header_ns, virtual_ns() + latency_ns);
    packet->payload_ns = std::max(link.latest_header_ns, virtual_ns() + late_ns);
    if (is_data) {
      const Task from{header.source_stage, header.kind, header.microbatch};
      packet->payload_ns = std::max(packet->payload_ns, virtual_ns() + model.latency_ns(from));
      if (model.fifo_payloads && late_ns == 0) {
        packet->payload_ns = link.latest_payload_ns =
            std::max(packet->payload_ns, link.latest_payload_ns);
      }
    }
    if (is_spoilt && model.fault.kind == FaultKind::kTruncated) {
      packet->is_cut = true;
    } else if (is_spoilt) {
      spoil_header(model.fault, header);
    }
    if (is_farewell && peer == model.forgotten_rank) {
      --link.sent;
      return sent(packet->source, {});
    }
    SimNetwork& network = network_;
    network.reach(peer, link.latest_header_ns, [&network, from = rank_, peer, packet] {
      SimTransport* receiver = network.endpoints[peer].transport;
      if (receiver != nullptr && !receiver->is_closed_) return receiver->receive(from, packet);
      if (SimTransport* sender = network.endpoints[from].transport; sender != nullptr) {
        sender->sent(packet->source, {StatusCode::kPeerLost, peer, "gone"});
      }
    });
  }

  void receive(std::int32_t from, const std::shared_ptr<SimPacket>& packet) {
    SimNetwork::Link& link = network_.link(from, rank_);
    if (link.is_broken) return give_back(network_, from, packet->source);
    const MessageHeader& header = packet->header;
    const std::string defect =
        network_.model.header_is_unchecked
            ? ""
            : header_defect(header, {kSimRun, from, link.received});
    ++link.received;
    if (!defect.empty() || packet->is_cut) {
      give_back(network_, from, packet->source);
      network_.refused_headers += !defect.empty();
      const Status for_peer{StatusCode::kPeerLost, rank_, "the connection was closed."};
      const Status lost{StatusCode::kPeerLost, from, "the connection ended inside a message."};
      const Status refused{StatusCode::kProtocol, rank_, "a malformed header: " + defect};
      return network_.break_connection(rank_, from, defect.empty() ? lost : refused, for_peer);
    }
    if (header.type == MessageType::kData) {
      offered_ = packet;
      sink_->on_header({from, 0}, header, packet->metadata);
      return;
    }
    sink_->on_control(from, header, packet->metadata);
    give_back(network_, from, packet->source);
  }

  static void give_back(SimNetwork& network, std::int32_t from, OutboundMessage* message) {
    SimTransport* sender = network.endpoints[from].transport;
    if (sender != nullptr) sender->sent(message, {});
  }

  static void release_counted(InboundMessage* message) {
    --*static_cast<std::int64_t*>(message->payload_owner);
    message->payload_owner = nullptr;
    message->release = std::exchange(message->pool_release, nullptr);
    message->release(message);
  }

  SimNetwork& network_;
  const std::int32_t rank_;
  MessageSink* sink_ = nullptr;
  bool is_closed_ = false;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::set<OutboundMessage*> posted_;
  std::set<std::int32_t> lost_;
  std::shared_ptr<SimPacket> offered_;
  std::int32_t num_data_ = 0;
};

inline void SimNetwork::break_connection(std::int32_t rank, std::int32_t peer,
                                         const Status& for_rank, const Status& for_peer) {
  link(rank, peer).is_broken = true;
  link(peer, rank).is_broken = true;
  if (endpoints[rank].transport != nullptr) endpoints[rank].transport->lose(peer, for_rank);
  reach(peer, virtual_ns() + model.control_latency_ns(), [this, rank, peer, for_peer] {
    if (endpoints[peer].transport != nullptr) endpoints[peer].transport->lose(rank, for_peer);
  });
}

// What it has sent still arrives; then its connections end.
inline void SimNetwork::kill(std::int32_t rank) {
  for (std::int32_t peer = 0; peer < static_cast<std::int32_t>(endpoints.size()); ++peer) {
    if (peer == rank) continue;
    link(peer, rank).is_broken = true;
    reach(peer, std::max(link(rank, peer).latest_header_ns, virtual_ns()), [=, this] {
      if (endpoints[peer].transport == nullptr || link(rank, peer).is_broken) return;
      link(rank, peer).is_broken = true;
      endpoints[peer].transport->lose(rank, {StatusCode::kPeerLost, rank, "its process ended."});
    });
  }
  endpoints[rank].transport = nullptr;
}

}  // namespace rrfp::test
