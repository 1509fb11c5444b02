// ProgressTurn: who calls a transport's progress() now: the progress thread, or the worker,
// which while it has nothing to run may as well move its messages itself, without the hop over
// another thread.
//
// Holders   kNobody   whoever comes first; the progress thread is woken for the transport.
//           kThread   the progress thread, for one pass.
//           kWorker   the worker, until it stops waiting. The progress thread is not woken.
//           kLent     the worker runs a short task and will come back; nobody is woken, and the
//                     progress thread takes over if it happens to pass.
// Threads   enter(), leave(): the progress thread. The rest: the worker (whoever waits for it).
// Progress  every call is wait-free and may fail; nobody waits for a turn here.
// Edges     H1  leaving is a release, taking an acquire, all on one word: who has the turn sees
//               all that the last one did inside progress().
// Checked by tests/cpp/model/progress_turn_model.cc (every interleaving, and mutants) and
// tests/cpp/stress/rank_runtime_stress.cc (TSan).
#pragma once

#include <atomic>
#include <cstdint>

namespace rrfp {

enum class TurnHolder : std::uint64_t { kNobody = 0, kThread, kWorker, kLent };

// Atom is the model's: it counts every access.
template <template <class> class Atom = std::atomic>
class ProgressTurn {
 public:
  // kThread: somebody else has it. Else the turn is the thread's, and this is how it was found.
  TurnHolder enter() {
    for (const TurnHolder from : {TurnHolder::kNobody, TurnHolder::kLent}) {
      if (take(from, TurnHolder::kThread)) return from;
    }
    return TurnHolder::kThread;
  }
  void leave() { put(TurnHolder::kNobody); }

  bool take() { return take(TurnHolder::kNobody, TurnHolder::kWorker); }
  bool take_lent() { return take(TurnHolder::kLent, TurnHolder::kWorker); }
  void lend() { put(TurnHolder::kLent); }
  void give_back() { put(TurnHolder::kNobody); }

 private:
  using Word = std::uint64_t;

  bool take(TurnHolder from, TurnHolder to) {
    Word expected = static_cast<Word>(from);
    return holder_.compare_exchange_strong(expected, static_cast<Word>(to),
                                           std::memory_order_acquire,   // H1
                                           std::memory_order_relaxed);  // not taken
  }
  void put(TurnHolder to) {
    holder_.store(static_cast<Word>(to), std::memory_order_release);  // H1
  }

  Atom<Word> holder_{};
};

}  // namespace rrfp
