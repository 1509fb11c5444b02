// ReadySet: which tasks of a rank can run now, ordered by the hint.
//
// Purpose  Any thread says "this task is ready"; the worker asks for the best one.
// Shape    Tasks are numbered by hint position inside their class (kind x chunk). A class is a
//          bitmap with a 64-ary summary above it: bit i of a summary word says that word i of
//          the level below may be nonzero. "May": a set summary bit over an empty word is
//          legal and repaired by the worker; an unset one over a nonzero word is not, once
//          the arrive() that made it nonzero has returned.
// Threads  arrive(): any number of threads. Everything else: the rank's worker only.
// Progress arrive() is wait-free: one RMW for the record of arrivals and one per level.
//          head() and claim() are lock-free: they repeat only when an arrival interferes.
// Bound    Fixed at construction; nothing is allocated afterwards.
// Once     A task arrives once and is claimed once. A second arrival changes nothing and
//          returns false.
//
// Ordering edges (cited where they are used)
//   R1  arrive() sets the leaf bit with release; head()/contains() read it with acquire. Who
//       sees the bit also sees what was written before arrive(): the input's buffer.
//   R2  arrive() sets the leaf before the summary, each with an unconditional RMW; the worker
//       clears the summary bit with an acq_rel RMW and *then* reads the leaf again, setting
//       the summary bit back when the leaf is nonzero. The RMWs on the summary word are
//       totally ordered: either the worker's clear reads from the arrival (and its second
//       look sees the leaf), or the arrival comes later and leaves the bit set.
//   R3  arrive() records the arrival with relaxed order: the record is only compared with
//       itself (an RMW finds its own bit), and carries no data.
//
// Cost     arrive + claim at 4,096 tasks: see benchmarks/ (callgrind).
// Checked  tests/cpp/unit/ready_set_test.cc, stress/ready_set_stress.cc (TSan),
//          model/ready_set_model.cc (every interleaving of small cases), model mutants.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace rrfp {

template <template <class> class Atom = std::atomic>
class ReadySet {
 public:
  // tasks_per_class[c] tasks in class c, numbered 0.. by hint position.
  explicit ReadySet(const std::vector<std::int32_t>& tasks_per_class);

  // Marks a task ready. False: it had arrived before, and nothing changed.
  bool arrive(std::int32_t task_class, std::int32_t index);

  // The ready task of the class with the lowest index, or -1.
  std::int32_t head(std::int32_t task_class);

  // Whether this very task is ready (arrived and not claimed).
  bool contains(std::int32_t task_class, std::int32_t index) const;

  // Takes a ready task out. False: it is not ready, and nothing changed.
  bool claim(std::int32_t task_class, std::int32_t index);

  std::int32_t num_classes() const;

 private:
  // To be designed by the implementation: levels of words per class in one allocation.
};

}  // namespace rrfp
