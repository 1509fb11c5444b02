// LaunchPacer: from when a worker may choose its next task, while its device is still at work.
//
// Purpose  A device must not run dry, and what is chosen early is chosen knowing less. So with
//          one task running, the next is chosen when the running one should end in as long as a
//          launch takes (kJit). Nothing is ever chosen while two are unfinished.
// Times    All are arguments; there is no clock inside. The host tells when it turned to a task,
//          when the launch was over, and at each look how many tasks the device has not ended.
// Learning Of each kind and chunk the last kNumRecent times. The running task is expected to take
//          the shortest of them: a device that idles loses all of that time, a choice made so much
//          early a few hundredths of it (by simulation 1 to 5 %), so that the choice should come
//          late once in so many times. Likewise a launch counts as the longest but one.
// Seen     What the host sees of the device are intervals: a task began after the one before it
//          ended and after the host turned to it, and at the latest when both that end was seen
//          and its launch was over; it ended between two looks. So its time on the device lies in
//          an interval too. A narrow one is a sample, as near to the shortest as it allows. A
//          wide one (the worker slept, waited for a task or for the interpreter in between, or
//          launched onto an idle device) is one only if it contradicts the shortest: then its
//          nearer bound. So tasks that have become shorter are found even when no launch is in
//          time any more.
// Messages A task that was launched behind a wait of the stream for a message has no known begin:
//          its time is bounded from above alone. While it runs, the next choice is due a short
//          task before the earliest end, as if the message were there: never too late.
// Launches From the moment the worker was free to choose, or got the task if it had to wait for
//          one, to the end of the launch. The next kind is not known before the choice, so
//          the dearest of the step's counts.
// Last     Where no choice is left (one task or none is unclaimed) there is nothing to wait for:
//          kJit is kEager, and what comes after the step may be launched behind its last task.
// Margin   kAheadNs: then the launch is over a little before the end, which is seen when it
//          happens, and not only bounded by the launch.
// Threads  the rank's worker only. Bound: two unfinished tasks. Cost: a look changes nothing
//          unless a task has ended.
// Lifetime over the steps of a rank with the same number of chunks.
// Checked  tests/cpp/unit/launch_pacer_test.cc, launch_pacer_learning_test.cc,
//          tests/cpp/sim/launch_pacing.cc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <utility>
#include <vector>

#include "arbiter/hint_order.hpp"

namespace rrfp {

enum class Lookahead : std::uint8_t {
  kNone,   // the next task is chosen when the device has ended all others
  kEager,  // when one is unfinished
  kJit,    // when one is unfinished and should end in as long as a launch takes
};

class LaunchPacer {
 public:
  static constexpr std::int64_t kNotBeforeAnEnd = std::numeric_limits<std::int64_t>::max();
  static constexpr std::int64_t kAheadNs = 20000;  // as long as a short sleep takes
  static constexpr std::int64_t kWidest = 8;  // a narrow interval is this much below its end
  static constexpr std::size_t kNumRecent = 16;

  explicit LaunchPacer(std::int32_t num_chunks);

  std::int32_t num_chunks() const { return num_chunks_; }

  // A step with these tasks. What the device was given before is none of it: it may be at work.
  void begin_step(const TaskTable& table, Lookahead lookahead);

  // The worker got a task; `waited`: there was none to be had when it was free to choose.
  void claimed(TaskKind kind, std::int32_t chunk, std::int64_t now_ns, bool waited);
  // The device will wait for a message before the claimed task.
  void waits_for_message() { claimed_.is_held_up = true; }
  // The claimed task has been launched to its end.
  void launched(std::int64_t now_ns);
  // So many launched tasks have not ended yet.
  void look(std::int64_t now_ns, std::size_t num_unfinished);

  std::size_t num_unfinished() const { return unfinished_.size(); }
  // The moment from which the next task may be chosen; kNotBeforeAnEnd: see after a look.
  std::int64_t choose_from_ns() const { return choose_from_ns_; }
  bool may_choose(std::int64_t now_ns) const { return now_ns >= choose_from_ns_; }

 private:
  struct Launch {
    TaskKind kind = TaskKind::kForward;
    std::int32_t chunk = 0;
    std::int64_t since_ns = 0;  // the host turned to it
    std::int64_t launched_ns = 0;
    bool is_held_up = false;  // by a message
  };
  // A moment that the host did not see: not before, not after.
  struct Between {
    std::int64_t low_ns = 0;
    std::int64_t high_ns = kNotBeforeAnEnd;
  };

  class Recent {
   public:
    void add(std::int64_t ns) { times_[num_++ % kNumRecent] = ns; }
    std::int64_t shortest_ns() const;         // 0: none is known
    std::int64_t longest_but_one_ns() const;  // 0: fewer than two are known

   private:
    std::array<std::int64_t, kNumRecent> times_{};
    std::size_t num_ = 0;
  };
  struct Times {
    Recent on_device, on_host;
  };

  Times& of(TaskKind kind, std::int32_t chunk) {
    return times_[static_cast<std::size_t>(kind) * num_chunks_ + chunk];
  }
  void ended(std::int64_t now_ns);
  static void learn(Recent& on_device, std::int64_t low_ns, std::int64_t high_ns);
  std::int64_t launch_ns();
  std::int64_t next_choice_ns();

  const std::int32_t num_chunks_;
  std::vector<Times> times_;                                // by kind and chunk
  std::vector<std::pair<TaskKind, std::int32_t>> classes_;  // of the step
  Lookahead lookahead_ = Lookahead::kJit;
  std::int32_t num_unclaimed_ = 0;
  Launch claimed_;
  std::deque<Launch> unfinished_;  // oldest first
  Between last_end_;
  std::int64_t last_look_ns_ = 0;  // 0: none in this step
  std::int64_t choose_from_ns_ = 0;
};

}  // namespace rrfp
