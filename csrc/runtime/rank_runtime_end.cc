// How a RankRuntime ends: aborts, the goodbye, and what is left afterwards.
#include <algorithm>
#include <utility>

#include "base/check.hpp"
#include "comm/fork_guard.hpp"
#include "runtime/rank_runtime.hpp"
#include "runtime/status_body.hpp"

namespace rrfp {

void RankRuntime::abort(const Status& status, bool tell_others) {
  RRFP_INVARIANT(!status.ok(), "abort() without a reason");
  {
    std::lock_guard lock(status_mutex_);
    if (!status_.ok()) return;
    status_ = status;
    last_views_ = look();  // before anybody closes
  }
  aborted_.store(true, std::memory_order_seq_cst);  // G4
  if (tell_others) tell_peers(MessageType::kAbort, to_bytes(status));
  if (agreement_ != nullptr) agreement_->end(status);  // rings: this worker sleeps there, too
  transport_->release_streams();
  wake_.notify();
  sends_.notify();
}

Status RankRuntime::status() const {
  std::lock_guard lock(status_mutex_);
  return status_;
}

OutboundMessage* RankRuntime::make_message(MessageType type) const {
  auto* message = new OutboundMessage;
  message->header.type = type;
  message->header.run = options_.run;
  return message;
}

void RankRuntime::tell_peers(MessageType type, const std::vector<std::byte>& body) {
  for (std::int32_t peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank() || watch_.has_left(peer)) continue;
    OutboundMessage* message = make_message(type);
    message->metadata = body;
    post(peer, message);
  }
}

void RankRuntime::close(std::int64_t timeout_ms) {
  if (is_closed_) return;
  if (process_was_forked()) {  // nobody is there to say goodbye to, or to wait for
    is_closed_ = true;
    return;
  }
  const std::int64_t until_ns = now() + timeout_ms * 1000000;
  wait_outstanding(until_ns, true);
  // From here on the loss of a peer is no news.
  is_closing_.store(true, std::memory_order_release);  // G5
  // The goodbye must not overtake the abort that is its reason, which another rank or thread
  // may still be telling. Who hears it twice keeps the first.
  if (is_aborted()) tell_peers(MessageType::kAbort, to_bytes(status()));
  tell_peers(MessageType::kBye, {});
  wait_outstanding(until_ns, false);
  transport_->abort({StatusCode::kClosed, rank(),
                     "rank " + std::to_string(rank()) + " has closed its pipeline"});
  // The abort ends every post at the next progress(), farewells at their deadline.
  wait_outstanding(now() + 2 * Transport::kAbortFlushMs * 1000000, false);
  if (agreement_ != nullptr) agreement_->end({});  // after an abort it changes nothing
  if (has_joined_) ProgressThread::instance().remove(this);
  has_joined_ = false;
  is_closed_ = true;
  board_.set(Activity::kOutside, now());
}

RankRuntime::~RankRuntime() {
  close(0);
  if (process_was_forked()) {
    // Threads of the parent may have been inside it, and would be waited for in vain.
    (void)transport_.release();
    return;
  }
  transport_.reset();  // its last callbacks still need the rest
  for (InboundMessage* message : drain()) release(message);
}

std::vector<InboundMessage*> RankRuntime::drain() {
  hide_step();
  std::lock_guard lock(aside_mutex_);
  std::vector<InboundMessage*> messages = std::exchange(leftover_, {});
  for (InboundMessage* message : std::exchange(early_, {})) messages.push_back(message);
  if (step_) {
    const auto take = [&](InboundMessage* message) { messages.push_back(message); };
    step_->promised.deliver(true, take);
    for (void* payload : step_->engine.drain()) take(static_cast<InboundMessage*>(payload));
  }
  return messages;
}

void RankRuntime::release(InboundMessage* message) { message->release(message); }

std::vector<RankView> RankRuntime::views() const {
  std::lock_guard lock(status_mutex_);
  return status_.ok() ? look() : last_views_;
}

std::vector<RankView> RankRuntime::look() const {
  const std::int64_t now_ns = now();
  RankView own{.rank = rank(), .is_own = true, .state = own_state(now_ns),
               .decisions = board_.decisions()};
  return watch_.views(std::move(own), now_ns);
}

std::string RankRuntime::describe() const {
  const std::int64_t now_ns = now();
  return watch_.describe(own_state(now_ns), now_ns);
}

std::string RankRuntime::choices(std::int64_t now_ns) const {
  std::string text = "The last choices of each rank, seconds ago:";
  for (const RankView& view : look()) {
    text += "\nRank " + std::to_string(view.rank) + ": ";
    text += view.decisions.empty() ? "none" : decisions_text(view.decisions, now_ns);
  }
  return text;
}

}  // namespace rrfp
