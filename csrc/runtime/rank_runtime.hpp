// RankRuntime: one rank of one pipeline, across its steps. Joins the step engine to a
// transport, lets the worker sleep until something is ready, and ends the step everywhere
// when something breaks.
//
// Threads   The worker calls begin_step ... end_step and everything marked W. The progress
//           thread, the worker while it waits (worker_progress.hpp) or, with LocalTransport, the
//           sender's worker calls the MessageSink side. abort() may come from anywhere.
// Progress  A message is delivered, and a task claimed and retired, without a lock. Locks are
//           for what is rare: messages of a step that this rank has not begun, control, aborts.
// Waits     claim(), recv_control(), wait_sends() and close() all end on abort() and at their
//           time-out. None holds the GIL (the binding releases it) or a lock while waiting.
// Early     A peer may be a step ahead: its messages for the next step are kept and delivered
//           by begin_step(). Messages of a finished step are dropped and counted; of any other
//           step they are a protocol error.
// Promises  Of messages on their way to a device: promised_messages.hpp.
// Waiting   Where the plan waits, claim() announces the task to the ranks that need its output,
//           by a header alone, and sleeps until an announced task is due that the hint puts
//           first. An announcement that comes before its step or after it is dropped.
// Group     With an AgreementSegment the rank is a member of a group: claim() answers what the
//           group has decided, and the worker sleeps on the group's bell instead of its own. How
//           the rank ends is left in the segment for the other members, whose pipelines end with
//           it; a member that is inside a task counts as a busy peer.
// Failure   The first Status is kept. abort() sends it to all peers, wakes the worker, and
//           makes every later wait return it at once.
// Transfer  A message says when it was computed (PeerClocks): idle time is split there (StepClock).
// Watch     The progress thread ticks every runtime, also one whose transport does not need it:
//           heartbeats, silent peers and stalls (PeerWatch) hang on the tick. Ranks of one
//           process join it at their first step, because no word may reach a peer before all
//           are there; a peer counts as silent only once it has spoken.
// Bound     Early messages: what the peers' in-flight limits let them send of one step.
// Edges     G1  A sink counts itself in readers_, then reads current_; begin_step() clears
//               current_, then reads readers_. All seq_cst: either the sink sees no step, or
//               begin_step() sees the sink and waits for it before the old step goes.
//           G2  A sink leaves with release; begin_step() acquires: what it wrote is complete.
//           G3  on_sent() pushes on sent_ (PushList), then lowers outstanding_ with release;
//               wait_sends() acquires: when nothing is outstanding, take_sent() gets all.
//           G4  aborted_ is stored seq_cst before the wake-up; the worker looks at it after
//               WakeBell::prepare(), so it cannot sleep through an abort.
//           G5  is_closing_: release in close(), acquire in tick() and on_peer_lost(). Nothing is
//               ordered but the flag itself.
//           G6  A heartbeat's is_posted: cleared with release in on_sent(), acquired by
//               send_heartbeats(): the transport is done with the message before it is reused.
// Fork      In a forked child a runtime refuses to be used, and goes without a word or a wait.
// Lifetime  Inbound messages may outlive the runtime (PayloadPool).
// Checked   tests/cpp/unit/rank_runtime_test.cc, tests/cpp/stress/rank_runtime_stress.cc (TSan).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/push_list.hpp"
#include "base/status.hpp"
#include "comm/agreement_segment.hpp"
#include "comm/payload_pool.hpp"
#include "comm/progress_thread.hpp"
#include "comm/transport.hpp"
#include "comm/wake_bell.hpp"
#include "runtime/control_mailbox.hpp"
#include "runtime/peer_clocks.hpp"
#include "runtime/peer_watch.hpp"
#include "runtime/promised_messages.hpp"
#include "runtime/rank_state.hpp"
#include "runtime/runtime_options.hpp"
#include "runtime/step_clock.hpp"
#include "runtime/step_engine.hpp"
#include "runtime/worker_progress.hpp"

namespace rrfp {

enum class ClaimOutcome : std::uint8_t { kTask, kDone, kTimeout, kAborted };

struct ClaimResult {
  ClaimOutcome outcome = ClaimOutcome::kTimeout;
  std::int32_t local = -1;
  std::int64_t wait_until_ns = 0;  // kTimeout: see Choice
};

class RankRuntime final : public MessageSink, public Progressing {
 public:
  RankRuntime(std::unique_ptr<Transport> transport, RuntimeOptions options,
              std::unique_ptr<AgreementSegment> agreement = nullptr);
  ~RankRuntime() override;  // close() comes first, or the peers are told without waiting
  RankRuntime(const RankRuntime&) = delete;
  RankRuntime& operator=(const RankRuntime&) = delete;

  std::int32_t rank() const { return transport_->rank(); }
  std::int32_t num_ranks() const { return transport_->num_ranks(); }
  Transport& transport() { return *transport_; }

  // W. Makes the step current and delivers what came early. Steps are numbered one by one.
  void begin_step(std::shared_ptr<const StepPlan> plan, std::uint32_t step,
                  std::int64_t stall_timeout_ms);
  // W. Sleeps until a task can run. kTimeout after timeout_ms: call again (signals).
  ClaimResult claim(std::int64_t timeout_ms);
  void launched(const WordPoint& end) { last_launched_ = end; }  // W. A task, to its end
  // W. Inputs of the claimed task, the caller's now, or null; to be read after ->arrived.
  std::vector<InboundMessage*> take_inputs(std::int32_t local);
  // W. Hands an output (F) or an input gradient (B) to the stage that needs it.
  void post_output(std::int32_t local, std::int32_t target_stage, OutboundMessage* message);
  void retire(std::int32_t local);  // W.
  // W. Outbound messages whose on_sent() has come, as a list; null: none.
  OutboundMessage* take_sent() { return sent_.take_all(); }
  bool wait_sends(std::int64_t timeout_ms);  // W. False: time-out or abort, some are outstanding
  // W. Between steps: gives a card to the other members of the group, and gets theirs, by member.
  // An empty card: only looks again for those of the exchange under way. Empty: the time-out has
  // passed, or the run was aborted.
  std::vector<std::vector<std::byte>> exchange_cards(const std::vector<std::byte>& card,
                                                     std::int64_t timeout_ms);
  std::vector<std::string> owing_members() const;  // W. Who has not given its card, in words
  // W. The same number as every other member's after the same step; 0 without a group.
  std::uint64_t agreement_digest() const;
  const AgreementSegment* agreement() const { return agreement_.get(); }

  // W. Ends the step: returns its times, keeps its records until the next begin_step().
  StepTimes end_step();
  const StepEngine& engine() const;

  // W, after an abort or the last step. Messages that no task took; they belong to the caller
  // now, with their attachments. The step takes no more.
  std::vector<InboundMessage*> drain();

  static void release(InboundMessage* message);  // with its payload, to the pool; any thread

  // W. Small blobs between the Python sides, in order per peer; nullopt: time-out, abort.
  void send_control(std::int32_t peer, std::vector<std::byte> body);
  std::optional<std::vector<std::byte>> recv_control(std::int32_t peer, std::int64_t timeout_ms,
                                                     bool is_tying = false);

  void abort(const Status& status, bool tell_peers = true);
  Status status() const;

  // W. Says goodbye, lets what is outstanding go, leaves the progress thread.
  void close(std::int64_t timeout_ms);

  // What this rank is doing and what it waits for, and the last such word of each peer: in words,
  // and by rank, with the decisions; after an abort, as it was then.
  std::string describe() const;
  std::vector<RankView> views() const;

  // Messages of finished steps, dropped: a count.
  std::int64_t num_late() const { return num_late_.load(std::memory_order_relaxed); }

  // MessageSink and Progressing: the transport's and the progress thread's.
  void on_header(RecvTicket ticket, const MessageHeader& header,
                 std::span<const std::byte> metadata) override;
  void on_message(std::int32_t peer, InboundMessage* message) override;
  void on_arrived() override { wake_.notify(); }
  void on_sent(OutboundMessage* message, const Status& status) override;
  void on_control(std::int32_t peer, const MessageHeader& header,
                  std::span<const std::byte> body) override;
  void on_peer_lost(std::int32_t peer, const Status& status) override;
  std::size_t progress(std::int64_t now_ns) override { return progress_.pass(now_ns); }
  void tick(std::int64_t now_ns) override;
  int wait_fd() const override { return transport_->wait_fd(); }

 private:
  struct Step {
    Step(std::shared_ptr<const StepPlan> plan, std::int32_t rank, TaskTimes* times,
         std::unique_ptr<StepAgreement> agreement, std::uint32_t step, std::int64_t timeout_ms)
        : engine(std::move(plan), rank, times, std::move(agreement)), number(step),
          stall_timeout_ms(timeout_ms) {}
    StepEngine engine;
    const std::uint32_t number;
    const std::int64_t stall_timeout_ms;
    PromisedMessages promised;
    std::atomic<bool> is_over{false};  // after end_step(): what still comes is late
  };
  struct Heartbeat {
    OutboundMessage message;
    std::atomic<bool> is_posted{false};
  };
  class StepGuard;  // holds the current step while a sink uses it (G1, G2)

  void join_progress_thread();
  void hide_step();
  void swap_step(std::unique_ptr<Step> next);
  std::unique_ptr<StepAgreement> make_agreement(const StepPlan& plan, std::uint32_t step);
  std::uint32_t prepare_claim() const;
  Choice choose(std::int64_t now_ns);
  bool admits_promises() const;
  bool can_go_on(const Choice& choice);
  std::string members_text() const;
  RankState own_state(std::int64_t now_ns) const;
  void check_members(const Step* step, std::int64_t now_ns);
  void blocked(const Choice& choice, std::int64_t now_ns);
  void announce_start(std::int32_t local);
  void on_started(const MessageHeader& header);
  void sleep(WorkerProgress::Hold& hold, std::uint32_t ticket, std::int64_t timeout_ns);
  std::int64_t now() const { return options_.now_ns(); }
  bool is_aborted() const { return aborted_.load(std::memory_order_seq_cst); }  // G4
  void post(std::int32_t peer, OutboundMessage* message);
  OutboundMessage* make_message(MessageType type) const;
  void address(MessageHeader& header, const Task& task, std::int32_t target_stage) const;
  void deliver_here(OutboundMessage* message);
  void give_back(OutboundMessage* message);
  void route(InboundMessage* message);
  void route_aside(InboundMessage* message);
  void deliver(Step& step, InboundMessage* message);
  void deliver_arrived(Step& step, InboundMessage* message);
  static bool is_from_owner(const Step& step, const MessageHeader& header);
  void set_aside(InboundMessage* message);
  void protocol_error(std::int32_t peer, const std::string& what);
  void on_heartbeat(std::int32_t peer, std::span<const std::byte> body);
  std::vector<RankView> look() const;
  std::string choices(std::int64_t now_ns) const;  // a line per rank
  void tell_peers(MessageType type, const std::vector<std::byte>& body);
  void send_heartbeats(std::int64_t now_ns, bool is_regular);
  void check_departed(const Step& step);
  bool wait_outstanding(std::int64_t until_ns, bool ends_on_abort);

  const RuntimeOptions options_;
  std::unique_ptr<AgreementSegment> agreement_;  // null: this rank decides alone
  std::unique_ptr<Transport> transport_;
  PayloadPool pool_;
  WorkerProgress progress_;
  WakeBell wake_;         // the worker sleeps here for tasks, control and aborts
  WakeBell sends_;        // and here for outstanding_ to become 0
  bool has_joined_ = false, is_closed_ = false;  // the worker's; joined: the progress thread
  std::atomic<bool> is_closing_{false};  // losses and silence are no news any more
  std::unique_ptr<TaskTimes> times_;    // the worker's; outlives step_
  std::unique_ptr<Step> step_;          // the worker's
  std::atomic<Step*> current_{nullptr};  // G1
  std::atomic<std::int32_t> readers_{0};  // G1, G2
  WordPoint last_launched_;              // the worker's
  StepClock clock_;
  TraceRange task_range_;  // the worker's: of the task that it runs
  ActivityBoard board_;
  std::mutex aside_mutex_;
  std::vector<InboundMessage*> early_;      // of the next step
  std::vector<InboundMessage*> leftover_;   // nobody will take these: drain()
  std::atomic<std::int64_t> num_late_{0};
  PushList<OutboundMessage> sent_;
  std::atomic<std::int64_t> outstanding_{0};      // posted, on_sent() not come; G3
  std::vector<Heartbeat> heartbeats_;             // by peer
  std::int64_t last_heartbeat_ns_ = 0;            // the progress thread's
  ControlMailbox mailbox_;
  PeerWatch watch_;
  PeerClocks clocks_;
  mutable std::mutex status_mutex_;
  Status status_;
  std::vector<RankView> last_views_;
  std::atomic<bool> aborted_{false};  // G4
};

}  // namespace rrfp
