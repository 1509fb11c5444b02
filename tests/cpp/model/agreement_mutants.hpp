// The steps of AgreementLog with one bug each, for the explorer (every interleaving of small
// cases) and for the simulated world (thousands of whole steps). Both must find each of them. In
// the world a call is not interrupted, so the two that look and act in two accesses have twins
// there (agreement_sim.cc) in which the other member has come in between.
#pragma once

#include "arbiter/agreement_log.hpp"

namespace rrfp::test {

inline constexpr std::memory_order kAnyOrder = std::memory_order_seq_cst;

// A log entry written without looking again whether somebody else has been there.
template <template <class> class Atom>
struct FillAsCheckThenAct : AgreementSteps<Atom> {
  using Steps = AgreementSteps<Atom>;
  static std::uint32_t fill(Atom<AgreementWord>& word, std::uint32_t step, std::uint32_t value) {
    const std::uint32_t there = Steps::value_of(word.load(kAnyOrder), step);
    if (there != 0) return there;
    word.store(Steps::make(step, value), kAnyOrder);
    return value;
  }
};

// Two members that join at once: one bit is lost, the set is never complete.
template <template <class> class Atom>
struct JoinAsCheckThenAct : AgreementSteps<Atom> {
  using Steps = AgreementSteps<Atom>;
  static std::uint32_t join(Atom<AgreementWord>& word, std::uint32_t step, std::uint32_t bit) {
    const std::uint32_t members = Steps::value_of(word.load(kAnyOrder), step);
    word.store(Steps::make(step, members | bit), kAnyOrder);
    return members;
  }
};

// Who loses keeps its own proposal.
template <template <class> class Atom>
struct LoserInsists : AgreementSteps<Atom> {
  static std::uint32_t fill(Atom<AgreementWord>& word, std::uint32_t step, std::uint32_t value) {
    AgreementSteps<Atom>::fill(word, step, value);
    return value;
  }
};

// The first of two to arrive is taken for both.
template <template <class> class Atom>
struct FirstIsEnough : AgreementSteps<Atom> {
  static std::uint32_t join(Atom<AgreementWord>& word, std::uint32_t step, std::uint32_t bit) {
    AgreementSteps<Atom>::join(word, step, bit);
    return 3 & ~bit;
  }
};

// Words of an earlier step are taken for this one's.
template <template <class> class Atom>
struct StepsMixedUp : AgreementSteps<Atom> {
  static std::uint32_t read(const Atom<AgreementWord>& word, std::uint32_t) {
    return static_cast<std::uint32_t>(word.load(kAnyOrder));
  }
};

}  // namespace rrfp::test
