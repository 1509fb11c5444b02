// StepEngine: the state of one rank in one step: which inputs have come, which tasks are
// ready, claimed and retired. It knows no clock, transport, thread or Python: the runtime
// drives it with real messages, the simulator with virtual ones.
//
// Inputs   Every task waits for a set of inputs, one bit each:
//            F   one per incoming edge (source stages: none)
//            B,I bit 0: its own F retired; bit 1+i: the gradient of consumer i
//            W   bit 0: its I retired
//          deliver() stores the payload, then sets the bit with one RMW, which also tells a
//          duplicate (the bit was set) and completion (it was the last one missing).
// Threads  deliver(): any thread. claim(), retire(), take_inputs(): the rank's worker.
// Progress deliver() is wait-free and allocates nothing.
// Edges    S1  deliver()'s RMW is acq_rel: whoever completes the set has acquired what every
//              earlier deliver() wrote; ReadySet's R1 passes it on to the worker.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "runtime/step_plan.hpp"

namespace rrfp {

enum class Delivery : std::uint8_t {
  kWaiting,    // stored; the task still lacks others
  kReady,      // stored; the task can run now: wake the worker
  kDuplicate,  // had come before: nothing changed
  kUnknown,    // no such task or edge on this rank: nothing changed
};

struct TaskRecord {
  std::int64_t ready_ns = 0;
  std::int64_t claimed_ns = 0;
  std::int64_t retired_ns = 0;
  std::int32_t overtaken = 0;  // hint positions it overtook
};

class StepEngine {
 public:
  StepEngine(std::shared_ptr<const StepPlan> plan, std::int32_t rank);

  // The output of `source_stage` for `target` (an F), or its gradient for `target` (a B or I).
  Delivery deliver(const Task& target, std::int32_t source_stage, void* payload,
                   std::int64_t now_ns);

  // Chooses and claims; Choice::local is -1 when nothing may run now.
  Choice claim(std::int64_t now_ns);

  // Payloads of a claimed task in the order of its inputs (null for "own F retired"), taken out.
  std::vector<void*> take_inputs(std::int32_t local);

  // The claimed task has been enqueued. Makes its dependents on this rank ready.
  void retire(std::int32_t local, std::int64_t now_ns);

  bool finished() const;                 // every task retired
  const StepPlan& plan() const;
  const TaskTable& table() const;
  const Arbiter& arbiter() const;
  const TaskRecord& record(std::int32_t local) const;

  // For reports. The task the hint wants next, and the first input it lacks:
  // source_stage -1: none of another stage.
  struct Missing {
    Task task;
    std::int32_t source_stage = -1;
  };
  std::vector<Missing> missing(std::size_t at_most) const;

  // Every payload still stored, taken out: after an abort. Any one thread, engine at rest.
  std::vector<void*> drain();
};

}  // namespace rrfp
