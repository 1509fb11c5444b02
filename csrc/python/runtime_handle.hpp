// RuntimeHandle: a RankRuntime as Python holds it. Adds what only the Python side knows:
// waiting without the GIL in slices that look for signals, and references to Python objects
// (owners of sent tensors, attachments) that are dropped on the worker, under the GIL.
//
// Threads  abort(), status(), describe() and views(): any. Everything else, end() too: the rank's
//          worker, or another while the worker is in no step; under the GIL.
// Waits    claim(), wait_launched(), recv_control() and wait_sends() release the GIL while they
//          wait, for kSliceMs at most; then signals are looked for (they reach the main thread
//          only).
// Devices  With a ComputeStream, tensors are sent from device memory once the stream has passed
//          the point of post_tensors(), and wait_launched() keeps the worker from choosing
//          earlier than the device needs (LaunchPacer). In a fixed order nothing is chosen, and
//          what is launched early is announced early: there kJit is kEager.
// Turns    Ranks that are threads of one process may share a WorkTurn. A task is chosen before the
//          turn is had, and run with it; a worker gives it up when nothing of its own is ready.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/compute_stream.hpp"
#include "runtime/launch_pacer.hpp"
#include "runtime/rank_runtime.hpp"
#include "runtime/work_turn.hpp"

namespace rrfp::python {

class RuntimeHandle {
 public:
  static constexpr std::int64_t kSliceMs = 100;
  static constexpr std::int32_t kClaimedNothing = -1;  // time-out
  static constexpr std::int32_t kAllClaimed = -2;      // every task of the step has run

  // `stream`: of a rank with a device; null on the CPU. `agreement`: null for one without a group.
  RuntimeHandle(std::unique_ptr<Transport> transport, const RuntimeOptions& options,
                std::unique_ptr<ComputeStream> stream = nullptr,
                std::unique_ptr<AgreementSegment> agreement = nullptr);
  ~RuntimeHandle();

  // Once, before the first step.
  void share_turn(std::shared_ptr<WorkTurn> turn) { turn_ = std::move(turn); }
  // Between steps, of the ranks that share a turn one speaks for all: whether they take turns.
  void take_turns(bool is_on) { turn_->start_step(is_on); }

  std::int32_t rank() const { return rank_; }
  std::int32_t num_ranks() const { return num_ranks_; }
  std::string transport_name() const { return transport_name_; }
  bool shares_address_space() const { return shares_address_space_; }
  std::int32_t device() const { return stream_ ? stream_->device() : -1; }

  void begin_step(std::shared_ptr<StepPlan> plan, std::uint32_t step,
                  std::int64_t stall_timeout_ms);
  std::int32_t claim(std::int64_t timeout_ms);
  // Per input of the task: None, the object that was attached, or an Inbound.
  pybind11::list take_inputs(std::int32_t local);
  void post_object(std::int32_t local, std::int32_t target_stage, pybind11::object object);
  // `segments`: (address, bytes); `owner` keeps them alive until they are sent.
  void post_tensors(std::int32_t local, std::int32_t target_stage, pybind11::bytes metadata,
                    const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& segments,
                    pybind11::object owner);
  // The stream on which the tasks of the coming step are launched, and how far ahead of it.
  void bind_stream(std::uintptr_t stream, Lookahead lookahead);
  // A task has been launched: marks its end on the stream, and waits until the next may be
  // chosen. False at the time-out: the device has not ended the tasks that must end before.
  bool wait_launched(std::int64_t timeout_ms);
  void retire(std::int32_t local);
  bool wait_sends(std::int64_t timeout_ms);
  StepTimes end_step();
  // Of the step that ended last: (text, ready, claimed, retired in ns, overtaken), as claimed.
  std::vector<std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t, std::int32_t>>
  records() const;
  std::int32_t peak_units() const;

  void send_control(std::int32_t peer, const std::string& body);
  pybind11::object recv_control(std::int32_t peer, std::int64_t timeout_ms, bool is_tying);

  // Every member's card by member, once all have given one; None at the time-out.
  pybind11::object exchange_cards(const std::string& card, std::int64_t timeout_ms);
  std::vector<std::string> owing_members() const { return runtime_->owing_members(); }
  std::uint64_t agreement_digest() const { return runtime_->agreement_digest(); }

  void abort(StatusCode code, std::int32_t origin_rank, const std::string& message,
             bool tell_peers);
  Status status() const;
  std::string describe() const;
  pybind11::list views() const;  // by rank, see rank_views.hpp; empty after end()
  void close(std::int64_t timeout_ms);
  // close(), and gives up the device: nothing else may be called afterwards but abort(),
  // status() and describe(). Ranks of one process end side by side, because each waits a while
  // for the others to let go of its memory.
  void end(std::int64_t timeout_ms);
  // Drops every message that no task took.
  void drain();

 private:
  OutboundMessage* take_spare();
  void drop_sent();
  // Calls `attempt(timeout_ms)` until it answers true; false at the time-out.
  template <class Attempt>
  bool wait_in_slices(std::int64_t timeout_ms, Attempt attempt);

  void device_failed(const std::string& what);

  void pace(const StepPlan& plan);
  bool wait_to_choose(std::int64_t slice_ms);
  bool claim_in_turn(std::int64_t slice_ms, ClaimResult* result);
  void give_turn();

  std::unique_ptr<ComputeStream> stream_;  // first: it outlives the transport
  std::unique_ptr<RankRuntime> runtime_;   // null after end()
  const std::int32_t rank_;
  const std::int32_t num_ranks_;
  const std::string transport_name_;
  const bool shares_address_space_;
  mutable std::mutex end_mutex_;           // runtime_ against those of any thread
  Status last_status_;                     // after end()
  std::deque<WordPoint> launched_;         // ends of tasks that the device may not have reached
  Lookahead lookahead_ = Lookahead::kJit;
  std::unique_ptr<LaunchPacer> pacer_;     // with a stream, from the first step on
  std::shared_ptr<WorkTurn> turn_;         // null: other ranks are in other processes, or on GPUs
  bool has_turn_ = false;
  OutboundMessage* spare_ = nullptr;  // messages that may be used again
};

}  // namespace rrfp::python
