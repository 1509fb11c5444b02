// The worker's side of RankRuntime: steps, claims, outputs. The sink's side is in
// rank_runtime_sink.cc, failure and the end in rank_runtime_end.cc.
#include "runtime/rank_runtime.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/check.hpp"
#include "base/clock.hpp"
#include "comm/fork_guard.hpp"

namespace rrfp {

namespace {

// An idle worker looks at what it waits for this often, so that others can be told.
constexpr std::int64_t kReportNs = 50 * kNsPerMs;
// And so often at its device, while a message is on its way there.
constexpr std::int64_t kLookNs = 5 * kNsPerUs;

const char* wait_text(Blocked why) {
  switch (why) {
    case Blocked::kLimit: return "wait: in-flight limit";
    case Blocked::kSlack:
    case Blocked::kHint: return "wait: hint";
    case Blocked::kAgreement: return "wait: agreement";
    default: return "wait: input";
  }
}

Transfer transfer_of(const StepEngine& engine, std::int32_t local) {
  const TaskRecord& record = engine.record(local);
  if (record.last_source < 0) return {};
  return {record.computed_ns, engine.plan().graph().rank_of(record.last_source)};
}

}  // namespace

RankRuntime::RankRuntime(std::unique_ptr<Transport> transport, RuntimeOptions options,
                         std::unique_ptr<AgreementSegment> agreement)
    : options_(options),
      agreement_(std::move(agreement)),
      transport_(std::move(transport)),
      progress_(*transport_, options_),
      heartbeats_(transport_->num_ranks()),
      mailbox_(transport_->num_ranks()),
      watch_(transport_->rank(), transport_->num_ranks(), options.peer_timeout_ms,
             options.now_ns()),
      clocks_(transport_->num_ranks(), transport_->shares_address_space()) {
  board_.set(Activity::kOutside, now());
  transport_->set_sink(this);
  if (transport_->wait_fd() < 0) return;
  try {
    join_progress_thread();
  } catch (...) {
    transport_.reset();  // its last callbacks still need the rest
    throw;
  }
}

void RankRuntime::join_progress_thread() {
  RRFP_CHECK(!process_was_forked(),
             "this process was forked from one that uses this pipeline; it works in the parent "
             "only. Build a pipeline of its own in a process that was started with spawn");
  if (has_joined_ || is_closed_ || options_.is_driven) return;
  progress_.share(this);
  if (progress_.is_shared()) {  // first: descriptors may have run out
    wake_.open();
    sends_.open();
  }
  ProgressThread::instance().add(this);
  has_joined_ = true;
}

void RankRuntime::begin_step(std::shared_ptr<const StepPlan> plan, std::uint32_t step,
                             std::int64_t stall_timeout_ms) {
  RRFP_CHECK(!is_closed_, "rank " + std::to_string(rank()) + " has closed its pipeline");
  RRFP_CHECK(plan->graph().num_ranks() == num_ranks(),
             "the plan is for " + std::to_string(plan->graph().num_ranks()) +
                 " ranks, but the transport joins " + std::to_string(num_ranks()));
  join_progress_thread();
  board_.set_step(step);
  trace_thread_name("rrfp rank " + std::to_string(rank()));
  const std::int64_t now_ns = now();
  board_.set(Activity::kRunning, now_ns);
  clock_.begin(num_ranks(), now_ns);
  // The engine of the last step still looks at the times it had, until it goes.
  std::unique_ptr<TaskTimes> before;
  const std::int32_t num_chunks = plan->table(rank()).num_chunks();
  if (times_ == nullptr || times_->num_chunks() != num_chunks) {
    before = std::exchange(times_, std::make_unique<TaskTimes>(num_chunks));
  }
  auto agreement = make_agreement(*plan, step);
  swap_step(std::make_unique<Step>(std::move(plan), rank(), times_.get(), std::move(agreement),
                                   step, stall_timeout_ms));
}

void RankRuntime::hide_step() {
  current_.store(nullptr, std::memory_order_seq_cst);  // G1
  // Bounded by the deliveries that are under way: sinks do not block.
  while (readers_.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();  // G1, G2
}

void RankRuntime::swap_step(std::unique_ptr<Step> next) {
  hide_step();
  std::vector<InboundMessage*> early;
  {
    std::lock_guard lock(aside_mutex_);
    if (step_) {
      const auto take = [this](InboundMessage* message) { leftover_.push_back(message); };
      step_->promised.deliver(true, take);
      for (void* payload : step_->engine.drain()) take(static_cast<InboundMessage*>(payload));
    }
    step_ = std::move(next);
    early.swap(early_);
    current_.store(step_.get(), std::memory_order_seq_cst);  // G1
  }
  for (InboundMessage* message : early) route(message);
}

const StepEngine& RankRuntime::engine() const {
  RRFP_INVARIANT(step_ != nullptr, "asked for the engine before the first step");
  return step_->engine;
}

ClaimResult RankRuntime::claim(std::int64_t timeout_ms) {
  TraceRange waiting;
  RRFP_INVARIANT(step_ != nullptr, "claim() before begin_step()");
  std::int64_t deadline_ns = 0;
  WorkerProgress::Hold hold(progress_);
  while (true) {
    const std::uint32_t ticket = prepare_claim();
    if (is_aborted()) {
      task_range_.end();
      return {ClaimOutcome::kAborted, -1};
    }
    const std::int64_t now_ns = now();
    const Choice choice = choose(now_ns);
    if (choice.local >= 0) {
      clock_.claimed(transfer_of(step_->engine, choice.local), now_ns);
      waiting.end();
      if (is_traced()) task_range_.begin(to_text(step_->engine.table().task(choice.local)));
      Decision decision = step_->engine.decision(choice, now_ns);
      decision.step = step_->number;
      board_.chose(decision);
      board_.set_running(step_->engine.table().task(choice.local), now_ns);
      if (agreement_ != nullptr) agreement_->set_inside(true);
      if (step_->engine.plan().waits()) announce_start(choice.local);
      const std::int64_t usual_ns = step_->engine.usual_duration_ns(choice.local);
      if (usual_ns > 0 && usual_ns <= WorkerProgress::kShortTaskNs) hold.lend();
      return {ClaimOutcome::kTask, choice.local};
    }
    if (step_->engine.finished()) return {ClaimOutcome::kDone, -1};
    if (agreement_ != nullptr && !can_go_on(choice)) continue;
    blocked(choice, now_ns);
    if (is_traced() && !waiting.is_open()) waiting.begin(wait_text(choice.blocked));
    if (deadline_ns == 0) deadline_ns = now_ns + timeout_ms * kNsPerMs;
    if (now_ns >= deadline_ns) {
      hold.lend();
      return {ClaimOutcome::kTimeout, -1, choice.wait_until_ns};
    }
    std::int64_t sleep_ns = std::min(deadline_ns - now_ns, kReportNs);
    if (choice.wait_until_ns > 0) sleep_ns = std::min(sleep_ns, choice.wait_until_ns - now_ns);
    sleep(hold, ticket, sleep_ns);
  }
}

Choice RankRuntime::choose(std::int64_t now_ns) {
  const auto take = [this](InboundMessage* message) { deliver_arrived(*step_, message); };
  step_->promised.deliver(false, take);
  const Choice choice = step_->engine.claim(now_ns);
  if (choice.local >= 0 || !admits_promises()) return choice;
  step_->promised.deliver(true, take);
  return step_->engine.claim(now_ns);
}

// Whether tasks may be launched whose messages are still on their way (see Promises).
bool RankRuntime::admits_promises() const {
  const std::int32_t num_promised = step_->promised.size();
  if (num_promised == 0 || transport_->owes_sends()) return false;
  if (step_->engine.plan().options().slack == 0) return true;
  return num_promised == 1 && word_reached(last_launched_);
}

// Tells the ranks that need the task's output that it has begun, and what it usually takes.
void RankRuntime::announce_start(std::int32_t local) {
  const StepEngine& engine = step_->engine;
  const std::int64_t usual_us = engine.usual_duration_ns(local) / kNsPerUs;
  if (usual_us <= 0 || usual_us < options_.least_announced_us || usual_us > UINT32_MAX) return;
  const Task task = engine.table().task(local);
  for (const std::int32_t stage : engine.plan().graph().targets_of(task)) {
    const std::int32_t peer = engine.plan().graph().rank_of(stage);
    if (peer == rank()) continue;
    OutboundMessage* message = make_message(MessageType::kStarted);
    address(message->header, task, stage);
    message->header.duration_us = static_cast<std::uint32_t>(usual_us);
    post(peer, message);
  }
}

// Nothing can run: books the time, and says what is missing once the wait is not a short one.
void RankRuntime::blocked(const Choice& choice, std::int64_t now_ns) {
  clock_.blocked(choice.blocked, now_ns);
  if (board_.activity() != Activity::kWaiting) {
    board_.set(Activity::kWaiting, now_ns);
    return;
  }
  if (now_ns - board_.since_ns() < kReportNs / 2) return;
  const auto [ready_here, absent] = step_->engine.absent();
  if (absent >= 0) return board_.set_missing(Blocked::kAgreement, ready_here, -1, absent);
  const auto missing = step_->engine.missing(1);
  if (missing.empty()) return;
  const auto& [task, source_stage] = missing.front();
  board_.set_missing(choice.blocked, task, source_stage,
                     source_stage < 0 ? -1 : step_->engine.plan().graph().rank_of(source_stage));
}

void RankRuntime::sleep(WorkerProgress::Hold& hold, std::uint32_t ticket,
                        std::int64_t timeout_ns) {
  // No bell rings when the device has run dry, or has got all that this rank owes its peers.
  if (step_->promised.size() > 0) timeout_ns = std::min(timeout_ns, kLookNs);
  if (agreement_ != nullptr) {
    hold.wait(agreement_->bell(), ticket, timeout_ns);
  } else {
    hold.wait(wake_, ticket, timeout_ns);
  }
}

std::vector<InboundMessage*> RankRuntime::take_inputs(std::int32_t local) {
  std::vector<InboundMessage*> inputs;
  for (void* payload : step_->engine.take_inputs(local)) {
    inputs.push_back(static_cast<InboundMessage*>(payload));
    if (payload == nullptr || inputs.back()->header.duration_us == 0) continue;
    step_->engine.learn_travel(local,
                               std::int64_t{inputs.back()->header.duration_us} * kNsPerUs);
  }
  return inputs;
}

void RankRuntime::post_output(std::int32_t local, std::int32_t target_stage,
                              OutboundMessage* message) {
  const StepEngine& engine = step_->engine;
  const Task task = engine.table().task(local);
  const auto& targets = engine.plan().graph().targets_of(task);
  RRFP_INVARIANT(std::find(targets.begin(), targets.end(), target_stage) != targets.end(),
                 to_text(task) + " has an output for stage " + std::to_string(target_stage) +
                     ", which does not wait for it");
  const std::int32_t peer = engine.plan().graph().rank_of(target_stage);
  RRFP_INVARIANT(message->attachment == nullptr || peer == rank() ||
                     transport_->shares_address_space(),
                 "an attachment cannot leave the process");
  MessageHeader& header = message->header;
  header.type = MessageType::kData;
  header.run = options_.run;
  address(header, task, target_stage);
  // On a device the output is still being computed, and nobody knows yet until when.
  const bool is_computed = header.place == MemoryPlace::kHost;
  const std::int64_t now_ns = now();
  const std::int64_t took_us = (now_ns - engine.record(local).claimed_ns) / kNsPerUs;
  header.duration_us =
      is_computed && took_us <= UINT32_MAX ? static_cast<std::uint32_t>(took_us) : 0;
  header.computed_us = is_computed ? to_short_us(now_ns) : 0;
  if (peer == rank()) {
    deliver_here(message);
  } else {
    post(peer, message);
  }
}

// What a message to `target_stage` says about the output of `task`.
void RankRuntime::address(MessageHeader& header, const Task& task,
                          std::int32_t target_stage) const {
  header.step = step_->number;
  header.source_rank = rank();
  header.source_stage = task.stage;
  header.target_stage = target_stage;
  header.microbatch = task.microbatch;
  header.kind = task.kind;
}

// Both stages are this rank's: no transport, the rest is the same.
void RankRuntime::deliver_here(OutboundMessage* message) {
  const std::uint64_t payload_bytes = total_payload_bytes(*message);
  message->header.payload_bytes = payload_bytes;
  message->header.metadata_bytes = static_cast<std::uint32_t>(message->metadata.size());
  InboundMessage* inbound = pool_.acquire(payload_bytes);
  outstanding_.fetch_add(1, std::memory_order_relaxed);  // G3: the same thread lowers it
  if (inbound == nullptr) {
    abort({StatusCode::kStageFailed, rank(),
           "rank " + std::to_string(rank()) + " has no memory for a message of " +
               std::to_string(payload_bytes) + " bytes between its own stages"});
  } else {
    inbound->header = message->header;
    inbound->metadata = message->metadata;
    inbound->attachment = std::exchange(message->attachment, nullptr);
    copy_segments(*message, inbound->payload);
    deliver(*step_, inbound);
  }
  give_back(message);
}

void RankRuntime::post(std::int32_t peer, OutboundMessage* message) {
  const MessageHeader& header = message->header;
  if (header.type == MessageType::kData && is_traced()) {
    const Task task{header.source_stage, header.kind, header.microbatch};
    message->span = begin_span(to_text(task) + " to stage " + std::to_string(header.target_stage),
                               header.payload_bytes);
  }
  outstanding_.fetch_add(1, std::memory_order_relaxed);  // G3: raised before it can be lowered
  transport_->post_send(peer, message);
}

void RankRuntime::retire(std::int32_t local) {
  const std::int64_t now_ns = now();
  step_->engine.retire(local, now_ns);
  clock_.retired(now_ns);
  task_range_.end();
  board_.add_retired();
  if (agreement_ != nullptr) agreement_->set_inside(false);
  board_.set(Activity::kRunning, now_ns);
}

bool RankRuntime::wait_sends(std::int64_t timeout_ms) {
  return wait_outstanding(now() + timeout_ms * kNsPerMs, true) && !is_aborted();
}

bool RankRuntime::wait_outstanding(std::int64_t until_ns, bool ends_on_abort) {
  WorkerProgress::Hold hold(progress_);
  while (true) {
    const std::uint32_t ticket = sends_.prepare();
    if (outstanding_.load(std::memory_order_acquire) == 0) return true;  // G3
    const std::int64_t left_ns = until_ns - now();
    if (left_ns <= 0 || (ends_on_abort && is_aborted())) return false;
    hold.wait(sends_, ticket, left_ns);
  }
}

StepTimes RankRuntime::end_step() {
  const std::int64_t now_ns = now();
  step_->is_over.store(true, std::memory_order_relaxed);  // what comes later is late either way
  board_.set(Activity::kOutside, now_ns);
  return clock_.end(now_ns);
}

void RankRuntime::send_control(std::int32_t peer, std::vector<std::byte> body) {
  RRFP_CHECK(body.size() <= kMaxMetadataBytes,
             "a control message has " + std::to_string(body.size()) + " bytes; the most is " +
                 std::to_string(kMaxMetadataBytes));
  join_progress_thread();
  if (peer == rank()) {
    mailbox_.put(peer, std::move(body));
    return;
  }
  OutboundMessage* message = make_message(MessageType::kControl);
  message->metadata = std::move(body);
  post(peer, message);
}

std::optional<std::vector<std::byte>> RankRuntime::recv_control(std::int32_t peer,
                                                                std::int64_t timeout_ms,
                                                                bool is_tying) {
  join_progress_thread();
  // relaxed: this thread alone writes it.
  const bool is_inside = step_ != nullptr && !step_->is_over.load(std::memory_order_relaxed);
  if (is_tying && board_.activity() != Activity::kTying) {
    board_.set_tying(peer, now());
  } else if (!is_tying && !is_inside && board_.activity() != Activity::kEntering) {
    board_.set(Activity::kEntering, now());
  }
  const std::int64_t until_ns = now() + timeout_ms * kNsPerMs;
  WorkerProgress::Hold hold(progress_);
  while (true) {
    const std::uint32_t ticket = wake_.prepare();
    // First: what the peer said before it went counts.
    if (auto body = mailbox_.take(peer)) {
      if (!is_inside) board_.set(Activity::kOutside, now());  // until it waits again, or begins
      return body;
    }
    if (is_aborted()) return std::nullopt;
    if (watch_.has_left(peer)) {
      abort({StatusCode::kClosed, peer,
             "rank " + std::to_string(peer) + " has closed its pipeline, while rank " +
                 std::to_string(rank()) + " waits for its " +
                 (is_tying ? "part of tied gradients" : "word on the coming step") +
                 ". Look at its output first: its script may have ended with an error. Else call "
                 "run_pipeline (or step) on every rank the same number of times"});
      return std::nullopt;
    }
    const std::int64_t left_ns = until_ns - now();
    if (left_ns <= 0) return std::nullopt;
    hold.wait(wake_, ticket, left_ns);
  }
}

}  // namespace rrfp
