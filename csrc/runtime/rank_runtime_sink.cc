// The sink's side of RankRuntime: what the transport and the progress thread call.
#include <utility>

#include "base/check.hpp"
#include "runtime/rank_runtime.hpp"
#include "runtime/status_body.hpp"

namespace rrfp {

namespace {

Task target_of(const MessageHeader& header) {
  return {header.target_stage, header.kind, header.microbatch};
}

std::string message_text(const MessageHeader& header) {
  return "the message of stage " + std::to_string(header.source_stage) + " for " +
         to_text(target_of(header)) + " of step " + std::to_string(header.step);
}

}  // namespace

class RankRuntime::StepGuard {
 public:
  explicit StepGuard(RankRuntime& runtime) : runtime_(runtime) {
    runtime_.readers_.fetch_add(1, std::memory_order_seq_cst);   // G1
    step_ = runtime_.current_.load(std::memory_order_seq_cst);   // G1
  }
  ~StepGuard() { runtime_.readers_.fetch_sub(1, std::memory_order_release); }  // G2
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;
  Step* step() const { return step_; }

 private:
  RankRuntime& runtime_;
  Step* step_;
};

void RankRuntime::on_header(RecvTicket ticket, const MessageHeader& header,
                            std::span<const std::byte> metadata) {
  const bool is_on_host = header.place == MemoryPlace::kHost;
  InboundMessage* message = pool_.acquire(is_on_host ? header.payload_bytes : 0);
  if (message == nullptr) {
    abort({StatusCode::kStageFailed, rank(),
           "rank " + std::to_string(rank()) + " has no memory for " + message_text(header) + " (" +
               std::to_string(header.payload_bytes) + " bytes)"});
    return;
  }
  message->header = header;
  message->metadata.assign(metadata.begin(), metadata.end());
  transport_->post_recv(ticket, message);
}

void RankRuntime::on_message(std::int32_t, InboundMessage* message) { route(message); }

void RankRuntime::route(InboundMessage* message) {
  const StepGuard guard(*this);
  if (guard.step() != nullptr && guard.step()->number == message->header.step) {
    deliver(*guard.step(), message);
  } else {
    route_aside(message);
  }
}

// A message of another step than the current one; also while the step changes.
void RankRuntime::route_aside(InboundMessage* message) {
  const MessageHeader header = message->header;
  Step* current = nullptr;
  {
    std::lock_guard lock(aside_mutex_);
    current = current_.load(std::memory_order_seq_cst);  // G1: our caller is counted
    if (current == nullptr || header.step == current->number + 1) {
      early_.push_back(message);
      return;
    }
  }
  if (header.step == current->number) return deliver(*current, message);
  set_aside(message);
  if (header.step < current->number) {
    num_late_.fetch_add(1, std::memory_order_relaxed);  // a count
  } else {
    protocol_error(header.source_rank, message_text(header) + " came in step " +
                                           std::to_string(current->number));
  }
}

void RankRuntime::deliver(Step& step, InboundMessage* message) {
  if (word_reached(message->arrived)) return deliver_arrived(step, message);
  step.promised.add(message);
  wake_.notify();
}

void RankRuntime::deliver_arrived(Step& step, InboundMessage* message) {
  const MessageHeader header = message->header;  // the worker may own the message afterwards
  if (step.is_over.load(std::memory_order_relaxed)) {  // late either way
    num_late_.fetch_add(1, std::memory_order_relaxed);  // a count
    return set_aside(message);
  }
  const std::int64_t now_ns = now();
  const std::int64_t computed_ns =
      header.source_rank == rank()
          ? 0
          : clocks_.to_own_ns(header.source_rank, header.computed_us, now_ns);
  const Delivery delivery = is_from_owner(step, header)
                                ? step.engine.deliver(target_of(header), header.source_stage,
                                                      message, now_ns, computed_ns)
                                : Delivery::kUnknown;
  switch (delivery) {
    case Delivery::kWaiting: return;
    case Delivery::kReady: return wake_.notify();
    case Delivery::kDuplicate:
      set_aside(message);
      return protocol_error(header.source_rank, message_text(header) + " came twice");
    case Delivery::kUnknown:
      set_aside(message);
      return protocol_error(header.source_rank,
                            message_text(header) + " fits no task of this rank");
  }
}

bool RankRuntime::is_from_owner(const Step& step, const MessageHeader& header) {
  const StageGraph& graph = step.engine.plan().graph();
  return header.source_stage >= 0 && header.source_stage < graph.num_stages() &&
         graph.rank_of(header.source_stage) == header.source_rank;
}

// Wakes nobody: a rank that has nothing to run cannot run it sooner, and one that waits for
// another announced task is woken by whatever comes.
void RankRuntime::on_started(const MessageHeader& header) {
  const StepGuard guard(*this);
  Step* step = guard.step();
  if (step == nullptr || step->number != header.step || !is_from_owner(*step, header)) return;
  step->engine.announce(target_of(header), header.source_stage,
                        std::int64_t{header.duration_us} * 1000, now());
}

void RankRuntime::set_aside(InboundMessage* message) {
  std::lock_guard lock(aside_mutex_);
  leftover_.push_back(message);
}

void RankRuntime::protocol_error(std::int32_t peer, const std::string& what) {
  abort({StatusCode::kProtocol, rank(),
         "rank " + std::to_string(rank()) + " refused a message of rank " + std::to_string(peer) +
             ": " + what + ". Use the same version of rrfp and the same options on all ranks"});
}

void RankRuntime::on_sent(OutboundMessage* message, const Status&) {
  if (message->header.type == MessageType::kHeartbeat) {
    heartbeats_[message->peer].is_posted.store(false, std::memory_order_release);  // G6
    return;
  }
  give_back(message);
}

void RankRuntime::give_back(OutboundMessage* message) {
  end_span(std::exchange(message->span, 0));
  if (message->header.type == MessageType::kData) {
    sent_.push(message);
  } else {
    delete message;
  }
  if (outstanding_.fetch_sub(1, std::memory_order_acq_rel) == 1) sends_.notify();  // G3
}

void RankRuntime::on_control(std::int32_t peer, const MessageHeader& header,
                             std::span<const std::byte> body) {
  switch (header.type) {
    case MessageType::kControl:
      mailbox_.put(peer, {body.begin(), body.end()});
      return wake_.notify();
    case MessageType::kHeartbeat:
      return on_heartbeat(peer, body);
    case MessageType::kAbort:
      if (const auto status = parse_status(body)) return abort(*status, false);
      return protocol_error(peer, "its abort is malformed");
    case MessageType::kStarted: return on_started(header);
    case MessageType::kBye:
      watch_.said_bye(peer);
      return wake_.notify();  // recv_control() may wait for this peer
    default:
      return protocol_error(peer, "it is of type " +
                                      std::to_string(static_cast<int>(header.type)));
  }
}

void RankRuntime::on_heartbeat(std::int32_t peer, std::span<const std::byte> body) {
  const std::int64_t now_ns = now();
  constexpr std::size_t kDecisionsAt = sizeof(RankState) + sizeof(ClockEcho);
  const bool is_whole = body.size() >= kDecisionsAt;
  const auto state = parse_rank_state(body);
  const auto echo = is_whole ? parse_echo(body.subspan(sizeof(RankState))) : std::nullopt;
  std::vector<Decision> decisions;
  if (!state || !echo || !parse_decisions(body.subspan(kDecisionsAt), now_ns, &decisions)) {
    return protocol_error(peer, "its heartbeat is malformed");
  }
  clocks_.heard(peer, *echo, now_ns);
  watch_.heard(peer, *state, now_ns, std::move(decisions));
}

void RankRuntime::on_peer_lost(std::int32_t peer, const Status& status) {
  if (is_closing_.load(std::memory_order_acquire)) return;  // G5
  Status lost = status;
  if (lost.code == StatusCode::kPeerLost) {
    lost.message += " Rank " + std::to_string(peer) + " " +
                    watch_.last_words(peer, now());
  }
  abort(lost);
}

void RankRuntime::tick(std::int64_t now_ns) {
  if (is_closing_.load(std::memory_order_acquire)) return;  // G5
  const bool is_regular = now_ns - last_heartbeat_ns_ >= options_.heartbeat_ms * 1000000;
  if (is_regular) last_heartbeat_ns_ = now_ns;
  send_heartbeats(now_ns, is_regular);
  if (agreement_ != nullptr) agreement_->sign_of_life();
  if (is_aborted()) return;
  const StepGuard guard(*this);
  const Step* step = guard.step();
  if (agreement_ != nullptr) check_members(step, now_ns);
  const RankState self = own_state(now_ns);
  auto trouble = watch_.check(self, step ? step->stall_timeout_ms : INT64_MAX, now_ns);
  if (trouble && agreement_ != nullptr) trouble->message += ". " + members_text();
  if (trouble) {
    if (trouble->code != StatusCode::kPeerLost) trouble->message += ".\n" + choices(now_ns);
    return abort(*trouble);
  }
  // relaxed: late by one tick either way.
  if (step != nullptr && !step->is_over.load(std::memory_order_relaxed)) check_departed(*step);
}

// To all peers, or between two regular times to those whose clock is to be measured soon.
void RankRuntime::send_heartbeats(std::int64_t now_ns, bool is_regular) {
  std::vector<std::byte> body;
  for (std::int32_t peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank() || watch_.has_left(peer)) continue;
    if (!is_regular && !clocks_.owes(peer)) continue;
    if (body.empty()) {
      body = to_bytes(own_state(now_ns));
      body.resize(body.size() + sizeof(ClockEcho));
      append_decisions(board_.decisions(), now_ns, &body);
    }
    Heartbeat& heartbeat = heartbeats_[peer];
    // A peer that does not read gets no second one.
    if (heartbeat.is_posted.load(std::memory_order_acquire)) continue;  // G6
    heartbeat.is_posted.store(true, std::memory_order_relaxed);  // only this thread posts them
    heartbeat.message.header = {};
    heartbeat.message.header.type = MessageType::kHeartbeat;
    write_echo(clocks_.echo_to(peer, now()), std::span(body).subspan(sizeof(RankState)));
    heartbeat.message.metadata = body;
    transport_->post_send(peer, &heartbeat.message);
  }
}

// A peer may finish its part of a step and close; not so while this rank needs it.
void RankRuntime::check_departed(const Step& step) {
  for (std::int32_t peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank() || !watch_.has_left(peer) || !step.engine.needs(peer)) continue;
    if (step.promised.size() > 0) continue;  // it may be what the rank still needs of this peer
    return abort({StatusCode::kClosed, peer,
                  "rank " + std::to_string(peer) + " has closed its pipeline, while rank " +
                      std::to_string(rank()) + " is in step " + std::to_string(step.number) +
                      " and still needs it. Look at its output first: its script may have ended "
                      "with an error. Else call run_pipeline (or step) on every rank the same "
                      "number of times"});
  }
}

}  // namespace rrfp
