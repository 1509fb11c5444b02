// RankState: what a rank is doing, as its peers know it: the body of a heartbeat, with its last
// decisions behind it.
// ActivityBoard: where the worker writes it without a lock, for the thread that sends it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "base/task.hpp"
#include "runtime/decision_log.hpp"

namespace rrfp {

enum class Activity : std::uint8_t {
  kOutside = 0,   // between steps
  kEntering = 1,  // waits for its peers' word on the coming step
  kWaiting = 2,   // inside a step, with nothing to run
  kRunning = 3,   // inside a task, or between two
  kTying = 4,     // after its tasks, waits for a peer's part of tied parameters' gradients
};

inline constexpr std::uint32_t kNoStep = UINT32_MAX;

// Little-endian on the wire, exactly as here.
struct RankState {
  Activity activity = Activity::kOutside;
  Blocked blocked = Blocked::kNot;        // kWaiting: why nothing runs
  TaskKind kind = TaskKind::kForward;     // of the task below
  std::uint8_t reserved = 0;
  std::uint32_t step = kNoStep;           // the current or the last one; kNoStep: none yet
  std::int32_t stage = -1;                // the task inside, or the one waited for; -1: none
  std::int32_t microbatch = -1;
  std::int32_t source_stage = -1;         // kWaiting: whose message the task lacks; -1: nobody's
  // Its rank; kTying: the rank waited for; kAgreement: the member (in its group) at which the
  // task is not ready.
  std::int32_t source_rank = -1;
  std::int64_t since_ms = 0;              // how long it has been doing this
  std::int64_t num_retired = 0;           // tasks since the rank began
};
static_assert(sizeof(RankState) == 40);

std::vector<std::byte> to_bytes(const RankState& state);
// Of the first bytes; nullopt: malformed.
std::optional<RankState> parse_rank_state(std::span<const std::byte> body);

// "is inside 2F3 since 12.3 s", "waits for 0B1, which lacks the message of stage 1 (rank 1), ...".
std::string to_text(const RankState& state);
std::string seconds_text(std::int64_t ms);  // "12.3 s"

// Threads  The rank's worker writes, any thread reads.
// Progress wait-free; three stores a task.
// Edges    B1  since_ns_ is stored before activity_ (release); a reader that acquires activity_
//              finds a since_ns_ at least as new. So a wait never looks older than it is.
//          B2  The rest is relaxed: it is only words in a report, and may be torn between two
//              tasks.
class ActivityBoard {
 public:
  void set(Activity activity, std::int64_t now_ns);
  void set_running(const Task& task, std::int64_t now_ns);
  void set_tying(std::int32_t source_rank, std::int64_t now_ns);
  void set_missing(Blocked blocked, const Task& task, std::int32_t source_stage,
                   std::int32_t source_rank);
  void chose(const Decision& decision) { decisions_.add(decision); }
  void set_step(std::uint32_t step) { step_.store(step, std::memory_order_relaxed); }  // B2
  void add_retired() {  // one writer
    num_retired_.store(num_retired_.load(std::memory_order_relaxed) + 1,
                       std::memory_order_relaxed);  // B2
  }

  Activity activity() const { return activity_.load(std::memory_order_acquire); }  // B1
  RankState read(std::int64_t now_ns) const;
  std::vector<Decision> decisions() const { return decisions_.last(); }
  // Since when the rank has been doing what it does.
  std::int64_t since_ns() const { return since_ns_.load(std::memory_order_relaxed); }  // B1

 private:
  void set_task(const Task& task);

  std::atomic<Activity> activity_{Activity::kOutside};
  std::atomic<Blocked> blocked_{Blocked::kNot};
  std::atomic<TaskKind> kind_{TaskKind::kForward};
  std::atomic<std::uint32_t> step_{kNoStep};
  std::atomic<std::int32_t> stage_{-1};
  std::atomic<std::int32_t> microbatch_{-1};
  std::atomic<std::int32_t> source_stage_{-1};
  std::atomic<std::int32_t> source_rank_{-1};
  std::atomic<std::int64_t> since_ns_{0};
  std::atomic<std::int64_t> num_retired_{0};
  DecisionLog decisions_;
};

}  // namespace rrfp
