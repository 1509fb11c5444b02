// Every interleaving of small cases of AgreementLog, with one member dying at each of its
// accesses in turn; and the same with one step weakened at a time, which must turn red.
#include "check.hpp"
#include "model/agreement_cases.hpp"
#include "model/agreement_mutants.hpp"

namespace rrfp::test {
namespace {

using Steps = AgreementSteps<ModelAtomic>;
constexpr std::uint64_t kMostAccesses = 16;  // of a member in these cases

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
    for (std::size_t dying = 0; dying < of.arrivals.size(); ++dying) {
      for (std::uint64_t dies_at = 1; dies_at <= kMostAccesses; ++dies_at) {
        const Exploration result = explore_agreement<Steps>(of, dying, dies_at);
        states += result.states;
        if (result.violations != 0) {
          fail(__FILE__, __LINE__, std::string(of.name) + ", member " + std::to_string(dying) +
                                       " dying at access " + std::to_string(dies_at) + ": " +
                                       result.first_violation);
        }
      }
    }
    std::printf("  %-40s %8lld states with a death\n", of.name, static_cast<long long>(states));
    CHECK(states > 100);
  }
}

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
  expect_red<FillAsCheckThenAct<ModelAtomic>>("fill as check-then-act");
  expect_red<JoinAsCheckThenAct<ModelAtomic>>("join as check-then-act");
  expect_red<LoserInsists<ModelAtomic>>("the loser insists");
  expect_red<FirstIsEnough<ModelAtomic>>("the first is enough");
  expect_red<StepsMixedUp<ModelAtomic>>("steps mixed up");
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_model(argc, argv); }
