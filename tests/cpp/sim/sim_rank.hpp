// SimRank: one rank as a session drives it, on a real RankRuntime: it enters the step (views to
// rank 0, its decision back), runs the tasks, meets the others at the end, goes on with the next
// step; when something breaks it takes what is left and closes. A worker that never sleeps:
// pump() goes as far as it can.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/rank_runtime.hpp"
#include "sim_content.hpp"
#include "sim_meeting.hpp"
#include "sim_transport.hpp"
#include "step_script.hpp"

namespace rrfp::test {

class SimRank {
 public:
  enum class Phase : std::uint8_t {
    kEnter, kAbsent, kMeeting, kRun, kSends, kParting, kDone, kFailed, kDead
  };

  SimRank(SimNetwork& network, std::int32_t rank, const StepScript& script)
      : network_(network), script_(script), rank_(rank) {
    RuntimeOptions options;
    options.run = kSimRun;
    options.heartbeat_ms = 5;
    options.peer_timeout_ms = 40;
    options.least_announced_us = 0;
    options.now_ns = read_virtual_clock;
    options.is_driven = true;
    runtime_ = std::make_unique<RankRuntime>(std::make_unique<SimTransport>(network, rank),
                                             options);
  }
  ~SimRank() { end(); }

  RankRuntime& runtime() { return *runtime_; }
  Phase phase() const { return phase_; }
  bool is_over() const { return phase_ >= Phase::kDone; }
  std::uint32_t num_finished() const { return num_finished_; }
  const Status& status() const { return status_; }
  const std::string& wrong() const { return wrong_; }       // its tasks were given something else
  std::int64_t num_live_outputs() const { return num_live_outputs_; }
  std::int64_t num_late() const { return num_late_; }
  std::int64_t fault_ns() const { return fault_ns_; }
  // Of the last step that ended, times from its start.
  const std::vector<VirtualTask>& ran() const { return finished_ran_; }
  std::int32_t peak_units() const { return peak_units_; }
  const StepTimes& times() const { return times_; }
  std::int64_t begun_ns() const { return begun_ns_; }
  std::int64_t num_hint_waits = 0;

  void die() {
    if (is_over()) return;
    network_.kill(rank_);
    phase_ = Phase::kDead;
    fault_ns_ = virtual_ns();
    end();
  }

  void pump() {
    while (!is_over() && advance()) {
    }
  }

 private:
  static constexpr std::int64_t kGraceNs = 5000000;
  // One move; false: nothing to do before the next event.
  bool advance() {
    switch (phase_) {
      case Phase::kEnter: return enter();
      case Phase::kAbsent: return !runtime_->status().ok() && fail();
      case Phase::kMeeting: return meet();
      case Phase::kRun: return run();
      case Phase::kSends: return send_out();
      case Phase::kParting: return meet();
      default: return false;
    }
  }

  bool enter() {
    if (num_finished_ == script_.num_steps) return finish();
    if (virtual_ns() < script_.starts_ns) return false;  // the next tick looks again
    const Fault& fault = network_.model.fault;
    if (fault.kind == FaultKind::kNeverStarts && fault.rank == rank_ &&
        fault.step == num_finished_) {
      fault_ns_ = virtual_ns();
      phase_ = Phase::kAbsent;
      return true;
    }
    const std::int64_t deadline_ns =
        virtual_ns() + script_.stall_timeout_ms * 1000000 + (rank_ == 0 ? 0 : kGraceNs);
    network_.events.at(deadline_ns, rank_, [] {});
    meeting_.start(*runtime_, deadline_ns);
    phase_ = Phase::kMeeting;
    return true;
  }

  bool meet() {
    const Met met = meeting_.look(*runtime_);
    if (met == Met::kYes) return phase_ == Phase::kMeeting ? begin() : leave();
    if (!runtime_->status().ok()) return fail();
    if (met == Met::kNotYet) return false;
    runtime_->abort({StatusCode::kTimedOut, meeting_.awaited(), "a rank did not enter the step"});
    return fail();
  }

  bool begin() {
    runtime_->begin_step(script_.plan, num_finished_, script_.stall_timeout_ms);
    network_.endpoints[rank_].step = num_finished_;
    begun_ns_ = virtual_ns();
    ran_.clear();
    phase_ = Phase::kRun;
    return true;
  }

  bool run() {
    if (running_ >= 0) return virtual_ns() >= busy_until_ns_ && retire();
    const ClaimResult claimed = runtime_->claim(0);
    switch (claimed.outcome) {
      case ClaimOutcome::kAborted: return fail();
      case ClaimOutcome::kDone: return end_tasks();
      case ClaimOutcome::kTask: return start(claimed.local);
      case ClaimOutcome::kTimeout: break;
    }
    if (claimed.wait_until_ns > virtual_ns()) {
      ++num_hint_waits;
      network_.events.at(claimed.wait_until_ns, rank_, [] {});
    }
    return false;
  }

  bool start(std::int32_t local) {
    const Fault& fault = network_.model.fault;
    const Task task = runtime_->engine().table().task(local);
    const bool strikes = fault.rank == rank_ && num_tasks_++ == fault.nth;
    inputs_ = runtime_->take_inputs(local);
    if (script_.swaps_consumers && inputs_.size() == 3) std::swap(inputs_[1], inputs_[2]);
    const std::string wrong = wrong_inputs(script_.plan->graph(), num_finished_, task, inputs_);
    if (!wrong.empty()) wrong_ = wrong;
    if (strikes && fault.kind == FaultKind::kTaskFails) {
      fault_ns_ = virtual_ns();
      runtime_->abort({StatusCode::kStageFailed, rank_, to_text(task) + " failed"});
      return true;
    }
    if (strikes && fault.kind == FaultKind::kDies) return die(), false;
    if (strikes && fault.kind == FaultKind::kStops) {
      fault_ns_ = virtual_ns();
      network_.endpoints[rank_].is_stopped = true;
    }
    running_ = local;
    busy_until_ns_ = virtual_ns() + script_.duration_ns(task);
    ran_.push_back({task, virtual_ns() - begun_ns_, busy_until_ns_ - begun_ns_});
    network_.reach(rank_, busy_until_ns_, [] {});
    return !network_.endpoints[rank_].is_stopped;
  }

  bool retire() {
    const std::int32_t local = std::exchange(running_, -1);
    release_inputs();
    const Task task = runtime_->engine().table().task(local);
    for (const std::int32_t stage : script_.plan->graph().targets_of(task)) {
      post(local, task, stage);
    }
    runtime_->retire(local);
    free_outputs();
    return true;
  }

  void post(std::int32_t local, const Task& task, std::int32_t stage) {
    ++num_live_outputs_;
    runtime_->post_output(local, stage, make_output(num_finished_, task, stage));
  }

  bool end_tasks() {
    peak_units_ = runtime_->engine().arbiter().peak_units();
    times_ = runtime_->end_step();
    finished_ran_ = std::exchange(ran_, {});
    phase_ = Phase::kSends;
    return true;
  }

  bool send_out() {
    if (!runtime_->wait_sends(0)) return !runtime_->status().ok() && fail();
    free_outputs();
    meeting_.start(*runtime_, INT64_MAX);
    phase_ = Phase::kParting;
    return true;
  }

  bool leave() {
    ++num_finished_;
    phase_ = Phase::kEnter;
    return true;
  }

  bool finish() { return phase_ = Phase::kDone, end(), false; }
  bool fail() { return status_ = runtime_->status(), phase_ = Phase::kFailed, end(), false; }

  void end() {
    if (runtime_ == nullptr) return;
    release_inputs();
    num_late_ = runtime_->num_late();
    std::vector<InboundMessage*> left = runtime_->drain();
    if (script_.forgets_leftovers && !left.empty()) left.pop_back();
    for (InboundMessage* message : left) RankRuntime::release(message);
    runtime_->close(0);
    free_outputs();
    for (InboundMessage* message : runtime_->drain()) RankRuntime::release(message);
    runtime_.reset();
  }

  void release_inputs() {
    for (InboundMessage* input : std::exchange(inputs_, {})) {
      if (input != nullptr) RankRuntime::release(input);
    }
  }

  void free_outputs() {
    OutboundMessage* message = runtime_->take_sent();
    while (message != nullptr) {
      OutboundMessage* next = message->next;
      free_output(message);
      --num_live_outputs_;
      message = next;
    }
  }

  SimNetwork& network_;
  const StepScript& script_;
  const std::int32_t rank_;
  std::unique_ptr<RankRuntime> runtime_;
  Phase phase_ = Phase::kEnter;
  std::uint32_t num_finished_ = 0;
  Status status_;
  std::string wrong_;
  std::int64_t begun_ns_ = 0, busy_until_ns_ = 0, fault_ns_ = -1;
  StepMeeting meeting_;
  std::int32_t running_ = -1, num_tasks_ = 0, peak_units_ = 0;
  std::vector<InboundMessage*> inputs_;
  std::vector<VirtualTask> ran_, finished_ran_;
  StepTimes times_;
  std::int64_t num_live_outputs_ = 0, num_late_ = 0;
};

}  // namespace rrfp::test
