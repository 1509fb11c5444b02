// StepEngine: the state of one rank in one step: which inputs have come, which tasks are
// ready, claimed and retired. It knows no clock, transport, thread or Python: the runtime
// drives it with real messages, the simulator with virtual ones.
//
// Inputs   Every task waits for a set of inputs, one bit each:
//            F   one per incoming edge (source stages: none)
//            B,I bit 0: its own F retired; bit 1+i: the gradient of consumer i
//            W   bit 0: its I retired
//          deliver() stores the payload and when it was computed, then sets the bit with one
//          RMW, which also tells completion (it was the last one missing). A bit that is set
//          already is a duplicate.
// Waiting  Where the plan waits, a rank announces what it starts, with what that usually takes;
//          announce() takes the word of a peer. learn_travel() compares it with what came.
// Group    With a StepAgreement a task that has all its inputs is ready when that is so at every
//          member, and claim() answers what the group has decided. There is no waiting then.
// Threads  deliver(), announce() and needs(): any thread; deliveries of one input come one after
//          another (an edge has one sender, and a sender's messages come from one thread at a
//          time). Everything else: the rank's worker.
// Progress deliver() is wait-free, announce() lock-free; both allocate nothing.
// Bound    Everything is sized by the plan at construction. What belongs to a task lies together,
//          a cache line each: a simulation of a thousand ranks waits for memory most of all.
// Edges    S1  deliver()'s RMW is acq_rel: whoever completes the set has acquired what every
//              earlier deliver() wrote; ReadySet's R1 passes it on to the worker.
//          S2  The look for a duplicate before the RMW is relaxed: deliveries of one input are
//              ordered among themselves already, and it carries no data.
//          S3  missing() and needs() read the bits relaxed: they serve reports, and an answer
//              may be old by the time it is read.
// Cost     deliver(): one RMW, and ReadySet's when it completes the task.
// Checked  tests/cpp/unit/step_engine_test.cc, sim/pipeline_sim.cc, stress/rank_runtime_stress.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "arbiter/step_agreement.hpp"
#include "base/cache_line.hpp"
#include "runtime/decision_log.hpp"
#include "runtime/step_plan.hpp"

namespace rrfp {

enum class Delivery : std::uint8_t {
  kWaiting,    // stored; the task still lacks others, or has not arrived at other members
  kReady,      // stored; the task can run now: wake the worker
  kDuplicate,  // had come before: nothing changed
  kUnknown,    // no such task or edge on this rank: nothing changed
};

struct TaskRecord {
  std::int64_t ready_ns = 0;    // 0: ready from the start (no inputs)
  std::int64_t claimed_ns = 0;
  std::int64_t retired_ns = 0;
  std::int32_t overtaken = 0;   // hint positions it overtook
  std::int64_t computed_ns = 0;    // since when its inputs had all been computed
  std::int32_t last_source = -1;   // whose message came last; -1: nobody's, or it is not known
                                   // when that one was computed
};

class StepEngine {
 public:
  // `times` is learnt from and added to; null: the step has its own, and knows nothing at first.
  // `agreement`: null where this rank decides alone. `memory` must outlive the engine.
  StepEngine(std::shared_ptr<const StepPlan> plan, std::int32_t rank, TaskTimes* times = nullptr,
             std::unique_ptr<StepAgreement> agreement = nullptr,
             std::pmr::memory_resource* memory = std::pmr::get_default_resource());

  // The output of `source_stage` for `target` (an F), or its gradient for `target` (a B or I),
  // which another rank had computed at computed_ns; 0: this rank did, or it is not known.
  Delivery deliver(const Task& target, std::int32_t source_stage, void* payload,
                   std::int64_t now_ns, std::int64_t computed_ns = 0);

  // `source_stage` has started what `target` waits for, which usually takes it expected_ns.
  // False: the plan does not wait, no such task or edge, or announced before; nothing changed.
  bool announce(const Task& target, std::int32_t source_stage, std::int64_t expected_ns,
                std::int64_t now_ns);

  // What the claimed task usually takes: what its announcement says; 0: not known yet.
  std::int64_t usual_duration_ns(std::int32_t local) const;

  // The input of the claimed task took its sender took_ns to compute.
  void learn_travel(std::int32_t local, std::int64_t took_ns);

  // Chooses and claims; Choice::local is -1 when nothing may run now.
  Choice claim(std::int64_t now_ns);

  // Payloads of a claimed task in the order of its inputs (null for "own F retired"), taken out.
  std::vector<void*> take_inputs(std::int32_t local);

  // The claimed task has been enqueued. Makes its dependents on this rank ready.
  void retire(std::int32_t local, std::int64_t now_ns);

  // For simulations whose state is far larger than the cache: asks for what deliver(), announce()
  // or retire() of the task, and the claim() behind it, will touch. prefetch_further() finds its
  // way through what prefetch() asked for, so it is for a little later. Neither changes anything.
  void prefetch(const Task& task) const;
  void prefetch_further(const Task& task) const;

  bool finished() const { return num_retired_ == table().num_tasks(); }  // every task retired
  std::int32_t num_retired() const { return num_retired_; }
  std::int32_t rank() const { return rank_; }
  const StepPlan& plan() const { return *plan_; }
  const TaskTable& table() const { return plan_->table(rank_); }
  const Arbiter& arbiter() const { return arbiter_; }
  const TaskRecord& record(std::int32_t local) const { return tasks_.at(local).record; }

  // Null where this rank decides alone.
  const StepAgreement* agreement() const { return agreement_.get(); }

  // For reports. The task the hint wants next, and the first input it lacks:
  // source_stage -1: none of another stage.
  struct Missing {
    Task task;
    std::int32_t source_stage = -1;
  };
  // The first task in the hint's order that has all its inputs here, but not at the member.
  struct Absent {
    Task task;
    std::int32_t member = -1;  // -1: there is no such task
  };
  Absent absent() const;
  std::vector<Missing> missing(std::size_t at_most) const;
  // What the last claim() chose, as a Decision; the step is the caller's to fill in.
  Decision decision(const Choice& choice, std::int64_t now_ns) const;

  // Whether a task still lacks an input from a stage of this rank of the pipeline.
  bool needs(std::int32_t other_rank) const;

  // Any thread: whether a task still has to arrive at one of these members (one bit each).
  bool needs_members(std::uint32_t members) const;

  // Every payload still stored, taken out: after an abort. Any one thread, engine at rest.
  std::vector<void*> drain();

 protected:
  // Tests put other rules in the place of the plan's.
  StepEngine(std::shared_ptr<const StepPlan> plan, std::int32_t rank, TaskTimes* times,
             const ArbiterOptions& options, std::unique_ptr<StepAgreement>&& agreement,
             std::pmr::memory_resource* memory);

 private:
  struct Input {
    void* payload = nullptr;
    std::int64_t computed_ns = 0;
  };
  struct alignas(kCacheLineBytes) TaskState {
    std::atomic<std::uint64_t> arrived{0};   // S1; one bit per input
    std::int32_t first_input = 0;            // in inputs_
    std::int16_t num_inputs = 0;
    bool is_claimed = false;
    bool is_retired = false;
    TaskRecord record;
    std::uint64_t wanted() const { return ~std::uint64_t{0} >> (64 - num_inputs); }  // not of 0
  };

  std::int32_t chunk_of(std::int32_t local) const {
    return table().chunk_of_class(table().class_of(local));
  }
  // What a task waits for besides its own F or I: the stages on its incoming side.
  const std::vector<std::int32_t>& senders_of(const Task& task) const;
  // Bits before those of the senders: 1 for B and I (own F) and W (own I), 0 for F.
  static std::int32_t own_bits(TaskKind kind) { return kind == TaskKind::kForward ? 0 : 1; }
  // The task and the bit of an input; {-1, -1}: no such task or edge.
  std::pair<std::int32_t, std::int32_t> input_of(const Task& target,
                                                 std::int32_t source_stage) const;
  // `source`: TaskRecord::last_source, if it comes last.
  Delivery set_bit(std::int32_t local, std::int32_t bit, const Input& input, std::int32_t source,
                   std::int64_t now_ns);
  void release_dependents(const Task& task, std::int64_t now_ns);
  Missing missing_of(std::int32_t local) const;
  bool has_all_inputs(std::int32_t local) const {
    const TaskState& state = tasks_[local];
    return state.num_inputs == 0 ||
           state.arrived.load(std::memory_order_relaxed) == state.wanted();  // S3
  }
  bool arrive(std::int32_t local);  // true: it can run now
  void note_passed();

  std::shared_ptr<const StepPlan> plan_;
  std::int32_t rank_;
  std::optional<TaskTimes> own_times_;  // none: the caller's are used
  TaskTimes& times_;
  std::unique_ptr<StepAgreement> agreement_;  // null: none
  Arbiter arbiter_;
  std::pmr::vector<TaskState> tasks_;  // by local
  std::pmr::vector<Input> inputs_;     // task by task; S1
  std::vector<std::int32_t> none_;     // senders of a W
  std::int32_t num_retired_ = 0;
  Decision passed_;  // only what the last choice passed over
};

}  // namespace rrfp
