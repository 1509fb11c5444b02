// ReadySet with one step weakened at a time: the explorer must find each. A mutant that stays
// green here means that the net has a hole. (A publish whose order is too weak is invisible to
// a sequentially consistent model; stress/ready_set_stress.cc shows it to ThreadSanitizer.)
#include "check.hpp"
#include "model/ready_set_cases.hpp"

namespace rrfp::test {
namespace {

using Steps = ReadySteps<ModelAtomic>;
using Levels = ReadyLevels<ModelAtomic>;
using Word = ModelAtomic<ReadyWord>;

constexpr std::memory_order kIgnored = std::memory_order_seq_cst;

// The summary bit is there before the leaf: the worker clears it as stale, and nobody sets it
// again when the leaf comes.
struct SummaryBeforeLeaf : Steps {
  static void publish(const Levels& levels, std::uint32_t index) {
    for (std::int32_t level = levels.num_levels - 1; level >= 0; --level) {
      const std::uint32_t at = index >> (6 * level);
      levels.words[level][ready_word_of(at)].fetch_or(ready_bit_of(at), kIgnored);
    }
  }
};

// The tempting saving: leave the summary alone when the leaf was nonzero already. Whoever made
// it nonzero may not have got to the summary yet.
struct SummaryOnlyWhenFirst : Steps {
  static void publish(const Levels& levels, std::uint32_t index) {
    for (std::int32_t level = 0; level < levels.num_levels; ++level) {
      Word& word = levels.words[level][ready_word_of(index)];
      if (word.fetch_or(ready_bit_of(index), kIgnored) != 0) return;
      index = ready_word_of(index);
    }
  }
};

struct NoSecondLook : Steps {
  static void repair(Word& summary, std::uint32_t index, const Word&) {
    summary.fetch_and(~ready_bit_of(index), kIgnored);
  }
};

struct SecondLookBeforeClear : Steps {
  static void repair(Word& summary, std::uint32_t index, const Word& below) {
    if (below.load(kIgnored) == 0) summary.fetch_and(~ready_bit_of(index), kIgnored);
  }
};

struct ClaimAsCheckThenAct : Steps {
  static bool take(Word& leaf, std::uint32_t index) {
    const ReadyWord word = leaf.load(kIgnored);
    if ((word & ready_bit_of(index)) == 0) return false;
    leaf.store(word & ~ready_bit_of(index), kIgnored);
    return true;
  }
};

template <class Mutant>
void expect_red(const char* name) {
  for (const ReadySetCase& of : ready_set_cases()) {
    const Exploration result = explore_ready_set<Mutant>(of);
    if (result.violations == 0) continue;
    std::printf("  %-24s red in \"%s\": %s\n", name, of.name, result.first_violation.c_str());
    return;
  }
  fail(__FILE__, __LINE__, std::string(name) + " survived the explorer");
}

TEST_CASE(the_explorer_finds_each_mutant) {
  expect_red<SummaryBeforeLeaf>("summary before leaf");
  expect_red<SummaryOnlyWhenFirst>("summary only when first");
  expect_red<NoSecondLook>("no second look");
  expect_red<SecondLookBeforeClear>("second look before clear");
  expect_red<ClaimAsCheckThenAct>("claim as check-then-act");
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_model(argc, argv); }
