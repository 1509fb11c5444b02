// Every interleaving of small cases of AgreementLog, with one member dying at each of its
// accesses in turn; and the same with one step weakened at a time, which must turn red.
#include "check.hpp"
#include "model/agreement_cases.hpp"

namespace rrfp::test {
namespace {

using Steps = AgreementSteps<ModelAtomic>;
using Word = ModelAtomic<AgreementWord>;
constexpr std::memory_order kIgnored = std::memory_order_seq_cst;

TEST_CASE(members_agree_in_every_interleaving) {
  for (const AgreementCase& of : agreement_cases()) {
    const Exploration result = explore_agreement<Steps>(of);
    std::printf("  %-40s %8lld states %8lld runs\n", of.name,
                static_cast<long long>(result.states), static_cast<long long>(result.runs));
    CHECK(result.states > 20);
    if (result.violations != 0) {
      fail(__FILE__, __LINE__, std::string(of.name) + ": " + result.first_violation);
    }
  }
}

TEST_CASE(members_agree_wherever_one_dies) {
  const std::vector<AgreementCase> cases = agreement_cases();
  for (const std::size_t at : {std::size_t{1}, std::size_t{2}, std::size_t{4}}) {
    const AgreementCase& of = cases[at];
    std::int64_t states = 0;
    for (std::uint64_t dies_at = 1; dies_at <= 16; ++dies_at) {
      const Exploration result = explore_agreement<Steps>(of, 0, dies_at);
      states += result.states;
      if (result.violations != 0) {
        fail(__FILE__, __LINE__, std::string(of.name) + ", dying at access " +
                                     std::to_string(dies_at) + ": " + result.first_violation);
      }
    }
    std::printf("  %-40s %8lld states with a death\n", of.name, static_cast<long long>(states));
    CHECK(states > 100);
  }
}

// A log entry written without looking whether somebody else has been there.
struct FillAsCheckThenAct : Steps {
  static std::uint32_t fill(Word& word, std::uint32_t step, std::uint32_t value) {
    const std::uint32_t there = value_of(word.load(kIgnored), step);
    if (there != 0) return there;
    word.store(make(step, value), kIgnored);
    return value;
  }
};

// Two members that join at once: one bit is lost, the set is never complete.
struct JoinAsCheckThenAct : Steps {
  static std::uint32_t join(Word& word, std::uint32_t step, std::uint32_t bit) {
    const std::uint32_t members = value_of(word.load(kIgnored), step);
    word.store(make(step, members | bit), kIgnored);
    return members;
  }
};

// Who loses keeps its own proposal.
struct LoserInsists : Steps {
  static std::uint32_t fill(Word& word, std::uint32_t step, std::uint32_t value) {
    Steps::fill(word, step, value);
    return value;
  }
};

// The first to arrive is taken for all of them.
struct FirstIsEnough : Steps {
  static std::uint32_t join(Word& word, std::uint32_t step, std::uint32_t bit) {
    Steps::join(word, step, bit);
    return 3 & ~bit;
  }
};

// Words of an earlier step are taken for this one's.
struct StepsMixedUp : Steps {
  static std::uint32_t read(const Word& word, std::uint32_t) {
    return static_cast<std::uint32_t>(word.load(kIgnored));
  }
};

template <class Mutant>
void expect_red(const char* name) {
  for (const AgreementCase& of : agreement_cases()) {
    const Exploration result = explore_agreement<Mutant>(of);
    if (result.violations == 0) continue;
    std::printf("  %-24s red in \"%s\": %s\n", name, of.name, result.first_violation.c_str());
    return;
  }
  fail(__FILE__, __LINE__, std::string(name) + " survived the explorer");
}

TEST_CASE(the_explorer_finds_each_mutant) {
  expect_red<FillAsCheckThenAct>("fill as check-then-act");
  expect_red<JoinAsCheckThenAct>("join as check-then-act");
  expect_red<LoserInsists>("the loser insists");
  expect_red<FirstIsEnough>("the first is enough");
  expect_red<StepsMixedUp>("steps mixed up");
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_model(argc, argv); }
