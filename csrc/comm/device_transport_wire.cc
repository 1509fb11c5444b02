// The control messages of DeviceTransport: writing them, and judging those that come in.
#include <algorithm>
#include <cstring>

#include "comm/device_transport.hpp"

namespace rrfp {

namespace {

template <class T>
void append(std::vector<std::byte>& to, const T& value) {
  to.resize(to.size() + sizeof value);
  std::memcpy(to.data() + to.size() - sizeof value, &value, sizeof value);
}

template <class T>
bool read_front(std::span<const std::byte> body, T* value) {
  if (body.size() < sizeof *value) return false;
  std::memcpy(value, body.data(), sizeof *value);
  return true;
}

std::string task_text(const MessageHeader& header) {
  return to_text({header.target_stage, header.kind, header.microbatch});
}

}  // namespace

void DeviceTransport::announce(OutboundMessage* message) {
  Peer& peer = peer_of(message->peer);
  if (peer.is_stopped) {
    num_owed_.fetch_sub(1, std::memory_order_release);  // O1
    sink_->on_sent(message, peer.why_stopped);
    return;
  }
  const std::size_t body_bytes = sizeof(AnnounceBody) + message->metadata.size();
  if (body_bytes > kMaxMetadataBytes) {
    // relaxed: a count alone
    num_posted_[static_cast<std::size_t>(message->peer)].fetch_sub(1, std::memory_order_relaxed);
    num_owed_.fetch_sub(1, std::memory_order_release);  // O1
    sink_->on_sent(message, {StatusCode::kProtocol, rank_,
                             task_text(message->header) + " has " +
                                 std::to_string(message->metadata.size()) +
                                 " bytes of metadata; at most " +
                                 std::to_string(kMaxMetadataBytes - sizeof(AnnounceBody)) +
                                 " travel with a device message"});
    return;
  }
  Departure departure;
  departure.message = message;
  departure.id = peer.next_id++;
  departure.order = next_order_++;

  AnnounceBody body;
  body.id = departure.id;
  body.header = message->header;
  body.header.source_rank = rank_;
  body.header.metadata_bytes = static_cast<std::uint32_t>(message->metadata.size());
  body.header.payload_bytes = 0;
  for (const Segment& segment : message->segments) {
    body.header.payload_bytes += padded_bytes(segment.bytes);
  }
  OutboundMessage* control = take_control(MessageType::kAnnounce);
  control->header.step = message->header.step;
  append(control->metadata, body);
  control->metadata.insert(control->metadata.end(), message->metadata.begin(),
                           message->metadata.end());
  peer.waiting.push_back(departure);
  control_->post_send(message->peer, control);
}

void DeviceTransport::send_grant(std::int32_t peer, const GrantBody& grant) {
  OutboundMessage* control = take_control(MessageType::kGrant);
  append(control->metadata, grant);
  control_->post_send(peer, control);
}

void DeviceTransport::send_go(std::int32_t peer, const Departure& departure) {
  OutboundMessage* control = take_control(MessageType::kGo);
  control->header.computed_us = departure.computed_us;
  const std::vector<Segment>& segments = departure.message->segments;
  append(control->metadata,
         GoBody{departure.id, peer_of(peer).next_go_out++, segments.size()});
  for (const Segment& segment : segments) append(control->metadata, segment.bytes);
  control_->post_send(peer, control);
}

void DeviceTransport::on_announce(std::int32_t peer, const MessageHeader& outer,
                                  std::span<const std::byte> body) {
  AnnounceBody announced;
  if (!read_front(body, &announced)) {
    protocol_error(peer, "an announcement of " + std::to_string(body.size()) + " bytes");
    return;
  }
  MessageHeader& header = announced.header;
  const std::span<const std::byte> metadata = body.subspan(sizeof announced);
  if (!is_device_data(header) || header.magic != kMessageMagic ||
      header.version != kWireVersion || header.source_rank != peer ||
      header.metadata_bytes != metadata.size() || header.payload_bytes > kMaxPayloadBytes) {
    protocol_error(peer, "an announcement that does not describe a device message of its own");
    return;
  }
  header.run = outer.run;
  header.sequence = outer.sequence;
  ++peer_of(peer).num_announced;
  ++peer_of(peer).num_open;
  Arrival* arrival = free_arrivals_;
  if (arrival != nullptr) {
    free_arrivals_ = arrival->next;
  } else {
    arrival = arrivals_.emplace_back(std::make_unique<Arrival>()).get();
  }
  arrival->peer = peer;
  arrival->id = announced.id;
  arrival->payload_bytes = header.payload_bytes;
  sink_->on_header({peer, reinterpret_cast<std::uint64_t>(arrival)}, header, metadata);
}

void DeviceTransport::on_grant(std::int32_t peer_rank, std::span<const std::byte> body) {
  GrantBody grant;
  Peer& peer = peer_of(peer_rank);
  const bool is_whole = read_front(body, &grant) && body.size() == sizeof grant;
  const auto found =
      std::find_if(peer.waiting.begin(), peer.waiting.end(), [&](const Departure& departure) {
        return departure.id == grant.id && !departure.is_granted;
      });
  if (!is_whole || found == peer.waiting.end()) {
    protocol_error(peer_rank, "a grant for a message that does not wait for one");
    return;
  }
  found->grant = grant;
  found->is_granted = true;
}

void DeviceTransport::on_go(std::int32_t peer_rank, const MessageHeader& outer,
                            std::span<const std::byte> body) {
  GoBody go;
  Peer& peer = peer_of(peer_rank);
  const bool is_whole = read_front(body, &go) && go.num_segments <= kMaxTensors &&
                        body.size() == sizeof go + go.num_segments * sizeof(std::uint64_t);
  const auto found = std::find_if(peer.arriving.begin(), peer.arriving.end(),
                                  [&](const Arrival* arrival) {
                                    return arrival->id == go.id && !arrival->has_go;
                                  });
  if (!is_whole || found == peer.arriving.end()) {
    protocol_error(peer_rank, "a start of a message that was not granted");
    return;
  }
  Arrival& arrival = **found;
  arrival.segment_bytes.resize(go.num_segments);
  if (go.num_segments > 0) {
    std::memcpy(arrival.segment_bytes.data(), body.data() + sizeof go,
                go.num_segments * sizeof(std::uint64_t));
  }
  std::uint64_t payload_bytes = 0;
  for (const std::uint64_t bytes : arrival.segment_bytes) {
    if (bytes <= kMaxPayloadBytes) payload_bytes += padded_bytes(bytes);
  }
  if (payload_bytes != arrival.payload_bytes) {
    protocol_error(peer_rank, "segments of " + std::to_string(payload_bytes) +
                                  " bytes for a payload of " +
                                  std::to_string(arrival.payload_bytes));
    return;
  }
  arrival.has_go = true;
  arrival.buffer->header.computed_us = outer.computed_us;
  arrival.go_sequence = go.sequence;
}

OutboundMessage* DeviceTransport::take_control(MessageType type) {
  OutboundMessage* message = free_control_;
  if (message != nullptr) {
    free_control_ = message->next;
  } else {
    message = control_messages_.emplace_back(std::make_unique<OutboundMessage>()).get();
  }
  message->header = MessageHeader{};
  message->header.type = type;
  message->metadata.clear();
  return message;
}

}  // namespace rrfp
