// ReadySet: which tasks of a rank can run now, ordered by the hint.
//
// Purpose  Any thread says "this task is ready"; the worker asks for the best one.
// Shape    Tasks are numbered by hint position inside their class (kind x chunk). A class is a
//          bitmap with a 64-ary summary above it: bit i of a summary word says that word i of
//          the level below may be nonzero. "May": a set summary bit over an empty word is
//          legal and repaired by the worker; an unset one over a nonzero word is not, once
//          the arrive() that made it nonzero has returned.
//
//            level 1 (top)   [ 1 0 1 ........ ]        bit 2: "look at word 2"
//                              |   |
//            level 0 (leaf)  [..] [..] [.1.]           task 2 * 64 + 1 is ready
//
// Threads  arrive(): any number of threads. Everything else: the rank's worker only.
// Progress arrive() is wait-free: one RMW for the record of arrivals and one per level.
//          head() is lock-free: it looks again only after clearing a summary bit that a claim
//          left behind or an arrival is about to justify. claim() is one RMW.
// Bound    Fixed at construction; nothing is allocated afterwards.
// Once     A task arrives once and is claimed once. A second arrival changes nothing and
//          returns false.
//
// Ordering edges (cited where they are used)
//   R1  arrive() sets the leaf bit with release; head(), contains() and claim() read it with
//       acquire. Who sees the bit also sees what was written before arrive(): the input's
//       buffer.
//   R2  arrive() sets the leaf before the summary, each with an unconditional release RMW; the
//       worker clears the summary bit with an acquire RMW and *then* reads the leaf again,
//       setting the summary bit back when the leaf is nonzero. The RMWs on the summary word
//       are totally ordered: either the worker's clear reads from the arrival (and its second
//       look sees the leaf), or the arrival comes later and leaves the bit set. Nobody but the
//       worker reads a summary word, so its own clear and set need not be releases, and its
//       loads may be relaxed: a leaf not yet visible under a visible bit is an empty word,
//       which is repaired by this very edge.
//   R3  arrive() records the arrival with relaxed order: the record is only compared with
//       itself (an RMW finds its own bit), and carries no data.
//
// Lifetime Outlives every thread that may call arrive(). Neither copied nor moved.
// Cost     arrive + head + claim at 4,096 tasks: benchmarks/ready_set_cost.py (callgrind).
// Checked  tests/cpp/unit/ready_set_test.cc, stress/ready_set_stress.cc (TSan),
//          model/ready_set_model.cc (every interleaving of small cases), model/mutants.cc.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "base/check.hpp"
#include "base/prefetch.hpp"

namespace rrfp {

using ReadyWord = std::uint64_t;

inline constexpr std::uint32_t kReadyWordBits = 64;

// Indices of bits are unsigned here, so that these are a shift each.
constexpr std::uint32_t ready_word_of(std::uint32_t index) { return index / kReadyWordBits; }
constexpr ReadyWord ready_bit_of(std::uint32_t index) {
  return ReadyWord{1} << (index % kReadyWordBits);
}

inline constexpr std::int32_t kMaxReadyLevels = 6;  // 64^6 exceeds every 32-bit index

// The words of one class: level 0 is the leaf, the top level is a single word.
template <template <class> class Atom>
struct ReadyLevels {
  std::array<Atom<ReadyWord>*, kMaxReadyLevels> words{};
  std::int32_t num_levels = 0;
};

// The three steps whose orders matter. A template argument of ReadySet, so that the tests can
// weaken one at a time and see the nets go red.
template <template <class> class Atom>
struct ReadySteps {
  static void publish(const ReadyLevels<Atom>& levels, std::uint32_t index) {
    for (std::int32_t level = 0; level < levels.num_levels; ++level) {
      // R1 at the leaf, R2 between the levels.
      levels.words[level][ready_word_of(index)].fetch_or(ready_bit_of(index),
                                                         std::memory_order_release);
      index = ready_word_of(index);
    }
  }

  // Word `index` of a level, `below`, was seen empty under its bit of `summary`.
  static void repair(Atom<ReadyWord>& summary, std::uint32_t index, const Atom<ReadyWord>& below) {
    summary.fetch_and(~ready_bit_of(index), std::memory_order_acquire);  // R2
    // The second look of R2; relaxed suffices, the clear has just acquired.
    if (below.load(std::memory_order_relaxed) != 0) {
      summary.fetch_or(ready_bit_of(index), std::memory_order_relaxed);  // R2
    }
  }

  static bool take(Atom<ReadyWord>& leaf, std::uint32_t index) {
    const ReadyWord bit = ready_bit_of(index);
    return (leaf.fetch_and(~bit, std::memory_order_acquire) & bit) != 0;  // R1
  }
};

template <template <class> class Atom = std::atomic, class Steps = ReadySteps<Atom>>
class ReadySet {
 public:
  // tasks_per_class[c] tasks in class c, numbered 0.. by hint position.
  explicit ReadySet(const std::vector<std::int32_t>& tasks_per_class,
                    std::pmr::memory_resource* memory = std::pmr::get_default_resource());

  // Marks a task ready. False: it had arrived before, and nothing changed.
  bool arrive(std::int32_t task_class, std::int32_t index) {
    Class& of = classes_[task_class];
    const ReadyWord bit = ready_bit_of(index);
    const ReadyWord before =
        of.arrived[ready_word_of(index)].fetch_or(bit, std::memory_order_relaxed);  // R3
    if ((before & bit) != 0) return false;
    Steps::publish(of.levels, index);
    return true;
  }

  // The ready task of the class with the lowest index, or -1.
  std::int32_t head(std::int32_t task_class);

  // Whether this very task is ready (arrived and not claimed).
  bool contains(std::int32_t task_class, std::int32_t index) const {
    const Atom<ReadyWord>& leaf = classes_[task_class].levels.words[0][ready_word_of(index)];
    return (leaf.load(std::memory_order_acquire) & ready_bit_of(index)) != 0;  // R1
  }

  // Takes a ready task out. False: it is not ready, and nothing changed. The summary is left
  // as it is: the next head() repairs it if the word is empty then.
  bool claim(std::int32_t task_class, std::int32_t index) {
    return Steps::take(classes_[task_class].levels.words[0][ready_word_of(index)], index);
  }

  std::int32_t num_classes() const { return static_cast<std::int32_t>(classes_.size()); }

  // Asks for what head() reads first; then, when that has come, for what arrive() and claim()
  // write.
  void prefetch_heads() const {
    rrfp::prefetch(classes_.data(), classes_.size() * sizeof(Class));
    rrfp::prefetch(words_.data());
  }
  void prefetch(std::int32_t task_class, std::int32_t index) const {
    const Class& of = classes_[task_class];
    rrfp::prefetch(of.levels.words[0] + ready_word_of(index));
    rrfp::prefetch(of.arrived + ready_word_of(index));
  }

 private:
  struct Class {
    ReadyLevels<Atom> levels;
    Atom<ReadyWord>* arrived = nullptr;  // one bit per task, never cleared
  };

  static std::uint32_t words_for(std::uint32_t bits) {
    return (bits + kReadyWordBits - 1) / kReadyWordBits;
  }

  static std::size_t words_of(const std::vector<std::int32_t>& tasks_per_class) {
    std::size_t num_words = 0;
    for (const std::int32_t num_tasks : tasks_per_class) {
      RRFP_INVARIANT(num_tasks > 0, "a class of the ready set has no tasks");
      num_words += words_for(num_tasks);  // the record
      std::uint32_t level_words = num_tasks;
      do {
        level_words = words_for(level_words);
        num_words += level_words;
      } while (level_words > 1);
    }
    return num_words;
  }

  std::pmr::vector<Class> classes_;
  std::pmr::vector<Atom<ReadyWord>> words_;  // all levels and records of all classes
};

template <template <class> class Atom, class Steps>
ReadySet<Atom, Steps>::ReadySet(const std::vector<std::int32_t>& tasks_per_class,
                                std::pmr::memory_resource* memory)
    : classes_(tasks_per_class.size(), memory), words_(words_of(tasks_per_class), memory) {
  // The summaries of all classes lie together: head() reads them first.
  Atom<ReadyWord>* next = words_.data();
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    ReadyLevels<Atom>& levels = classes_[c].levels;
    levels.num_levels = 1;
    std::uint32_t level_words = words_for(tasks_per_class[c]);
    while (level_words > 1) {
      level_words = words_for(level_words);
      levels.words[levels.num_levels++] = next;
      next += level_words;
    }
  }
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    classes_[c].levels.words[0] = next;
    next += words_for(tasks_per_class[c]);
    classes_[c].arrived = next;
    next += words_for(tasks_per_class[c]);
  }
}

template <template <class> class Atom, class Steps>
std::int32_t ReadySet<Atom, Steps>::head(std::int32_t task_class) {
  const ReadyLevels<Atom>& levels = classes_[task_class].levels;
  Atom<ReadyWord>* const* const leaf = levels.words.data();
  Atom<ReadyWord>* const* const top = leaf + levels.num_levels - 1;
  Atom<ReadyWord>* const* level = top;
  std::uint32_t index = 0;  // of the word within its level
  for (;;) {
    const Atom<ReadyWord>& word = (*level)[index];
    const ReadyWord bits =
        word.load(level == leaf ? std::memory_order_acquire : std::memory_order_relaxed);  // R1; R2
    if (bits != 0) {
      index = index * kReadyWordBits + static_cast<std::uint32_t>(std::countr_zero(bits));
      if (level == leaf) return static_cast<std::int32_t>(index);
      --level;
    } else if (level == top) {
      return -1;
    } else {
      // One level up and look again: what remains there, or what has arrived meanwhile.
      ++level;
      Steps::repair((*level)[ready_word_of(index)], index, word);
      index = ready_word_of(index);
    }
  }
}

}  // namespace rrfp
