// RankRuntime: one rank of one pipeline, across its steps. Joins the step engine to a
// transport, lets the worker sleep until something is ready, and ends the step everywhere
// when something breaks.
//
// Threads   The worker calls begin_step ... end_step and everything marked W. The progress
//           thread (LocalTransport: the sender's worker) calls the MessageSink side. abort()
//           may come from anywhere.
// Waits     claim(), recv_control(), wait_sends() and close() all end on abort() and at their
//           time-out. None holds the GIL (the binding releases it) or a lock while waiting.
// Early     A peer may be a step ahead: its messages for the next step are kept and delivered
//           by begin_step(). Messages of a finished step are dropped and counted; of any other
//           step they are a protocol error.
// Failure   The first Status is kept. abort() sends it to all peers, wakes the worker, and
//           makes every later wait return it at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/event_count.hpp"
#include "base/status.hpp"
#include "comm/progress_thread.hpp"
#include "comm/transport.hpp"
#include "runtime/step_engine.hpp"

namespace rrfp {

struct RuntimeOptions {
  std::uint64_t run = 0;
  std::int64_t heartbeat_ms = 500;
  std::int64_t peer_timeout_ms = 60000;  // silence after which a peer counts as lost
};

enum class ClaimOutcome : std::uint8_t { kTask, kDone, kTimeout, kAborted };

struct ClaimResult {
  ClaimOutcome outcome = ClaimOutcome::kTimeout;
  std::int32_t local = -1;
};

// Where a step's wall time went on this rank, in ns; the parts add up to wall_ns.
struct StepTimes {
  std::int64_t wall_ns = 0;
  std::int64_t compute_ns = 0;      // between claim and retire
  std::int64_t idle_input_ns = 0;   // no task had all its inputs
  std::int64_t idle_limit_ns = 0;   // the in-flight limit held a ready forward back
  std::int64_t idle_slack_ns = 0;   // the hint put a task first that was not ready
  std::int64_t host_ns = 0;         // between retire and the next claim: rrfp's own cost
};

class RankRuntime final : public MessageSink, public Progressing {
 public:
  RankRuntime(std::unique_ptr<Transport> transport, RuntimeOptions options);
  ~RankRuntime() override;

  std::int32_t rank() const;
  std::int32_t num_ranks() const;
  Transport& transport();

  // W. Makes the step current and delivers what came early.
  void begin_step(std::shared_ptr<const StepPlan> plan, std::uint32_t step,
                  std::int64_t stall_timeout_ms);
  // W. Sleeps until a task can run. kTimeout after timeout_ms: call again (signals).
  ClaimResult claim(std::int64_t timeout_ms);
  // W. Inputs of the claimed task; InboundMessage* or null, owned by the caller now.
  std::vector<InboundMessage*> take_inputs(std::int32_t local);
  // W. Hands an output (F) or an input gradient (B) to the stage that needs it.
  void post_output(std::int32_t local, std::int32_t target_stage, OutboundMessage* message);
  // W.
  void retire(std::int32_t local);
  // W. Outbound messages whose on_sent() has come, as a list; null: none.
  OutboundMessage* take_sent();
  // W. True when nothing is outstanding any more; false at the time-out or after an abort.
  bool wait_sends(std::int64_t timeout_ms);
  // W. Ends the step: returns its times, keeps its records until the next begin_step().
  StepTimes end_step();
  const StepEngine& engine() const;

  // Gives an inbound message (and its payload) back to the pool; any thread.
  static void release(InboundMessage* message);

  // Small blobs between the Python sides, in order per peer. nullopt: time-out or abort.
  void send_control(std::int32_t peer, std::vector<std::byte> body);
  std::optional<std::vector<std::byte>> recv_control(std::int32_t peer, std::int64_t timeout_ms);

  void abort(const Status& status, bool tell_peers = true);
  Status status() const;

  // W. Says goodbye, lets what is outstanding go, leaves the progress thread.
  void close(std::int64_t timeout_ms);

  // What this rank is doing and what it waits for, and the last such word of each peer.
  std::string describe() const;
};

}  // namespace rrfp
