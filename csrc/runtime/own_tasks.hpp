// OwnTasks: one run over a graph of tasks that are no stages of a pipeline: the same arbiter picks
// among those that are ready, for any number of threads.
//
// Order     `order` lists every task once, the preferred first. Slack as for the arbiter; where it
//           is bounded, no task may stand before one that it waits for, or the run would never
//           end (StepPlan knows the same rule of a user's order).
// Ready     A task is ready when all that it waits for have been retired. retire() says which
//           became so and arrive() makes them claimable: between the two the caller may act on it.
// Threads   any, for all functions. Arrivals are those of ReadySet; claims are made one by one
//           under a lock, which tasks that are worth a thread do not feel.
// Waits     claim() sleeps until a task can run, all have been claimed, end() or its time-out.
// Edges     T1 The last fetch_sub of a task's count acquires what the tasks that it waited for
//              released by theirs (acq_rel): their effects are seen before it is claimed.
//           Everything else is ordered by the lock.
// Bound     all memory is taken at construction.
// Checked   tests/cpp/stress/own_tasks_stress.cc (TSan).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "arbiter/arbiter.hpp"

namespace rrfp {

// A circle in a graph given as "waits for" lists, task by task; empty: there is none.
std::vector<std::int32_t> circle_of_tasks(const std::vector<std::vector<std::int32_t>>& after);

class OwnTasks {
 public:
  static constexpr std::int32_t kNothing = -1;  // time-out
  static constexpr std::int32_t kDone = -2;     // every task has been claimed
  static constexpr std::int32_t kEnded = -3;    // end() was called

  // `after[i]`: what task i waits for, each once. UserError: an index out of range, a circle, an
  // order that omits or repeats a task, or one that bounded slack could not finish.
  OwnTasks(const std::vector<std::vector<std::int32_t>>& after,
           const std::vector<std::int32_t>& order, std::int32_t slack);

  // Those that wait for nothing, by position; call arrive() for each.
  std::vector<std::int32_t> first_ready() const;
  void arrive(std::int32_t task);
  std::int32_t claim(std::int64_t timeout_ms);
  // A claimed task has run: what is ready now, and was not before.
  std::vector<std::int32_t> retire(std::int32_t task);
  // No further task is claimed, and every claim() returns; for errors.
  void end();

 private:
  const TaskTable table_;
  const HintOrder order_;
  Arbiter arbiter_;
  std::vector<std::vector<std::int32_t>> dependents_;  // by task
  std::vector<std::atomic<std::int32_t>> num_missing_;  // by task; T1
  std::mutex mutex_;  // of claims; arrivals take it to wake without a gap
  std::condition_variable changed_;
  bool is_ended_ = false;
};

}  // namespace rrfp
