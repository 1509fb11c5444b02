// Thousands of seeded steps of several pipelines whose ranks agree with one another while their
// messages come at different moments, one process dying in every fourth; and members with a bug
// each, which must be found.
//
//   agreement_sim [seeds]     or RRFP_SEEDS; 3,000 by default. RRFP_SEED is the first one.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <utility>

#include "agreement_world.hpp"
#include "check.hpp"
#include "model/agreement_mutants.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

std::int64_t num_seeds = 3000;
constexpr std::int64_t kMutantSeeds = 300;
constexpr int kRed = 3;  // exit status of a process in which a mutant was found

template <class Member>
std::string verdict_of(std::uint64_t seed, std::string* text = nullptr) {
  const RandomStep step(seed);
  if (text != nullptr) *text = step.text();
  const auto num_members = static_cast<std::int32_t>(2 + seed % 3);
  return verdict(step, AgreementWorld<Member>(step, num_members, seed).run());
}

TEST_CASE(every_seeded_step_runs_in_one_order) {
  for (std::int64_t n = 0; n < num_seeds; ++n) {
    const std::uint64_t seed = test::seed() + static_cast<std::uint64_t>(n);
    std::string text;
    const std::string wrong = verdict_of<ThinkingMember<>>(seed, &text);
    if (wrong.empty()) continue;
    fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + wrong + " (" + text + ")");
    if (failures() > 5) return;
  }
}

// ---- Mutants: what a member would do with one bug. ----

// Decides for itself.
class AloneMember : public StepAgreement {
 public:
  AloneMember(const AgreementWords<std::atomic>&, std::int32_t, std::int32_t, std::int32_t,
              std::uint32_t) {}
  bool arrive(std::int32_t local) override {
    arrived_.push_back(local);
    return true;
  }
  Choice claim(Arbiter& arbiter) override {
    for (const std::int32_t local : std::exchange(arrived_, {})) arbiter.arrive(local);
    return arbiter.select();
  }
  std::uint32_t absentees(std::int32_t) const override { return 0; }
  std::uint64_t digest() const override { return 0; }

 private:
  std::vector<std::int32_t> arrived_;
};

using Steps = AgreementSteps<std::atomic>;
using Word = std::atomic<AgreementWord>;

// FillAsCheckThenAct, when somebody came between the two.
struct WritesOver : Steps {
  static std::uint32_t fill(Word& word, std::uint32_t step, std::uint32_t value) {
    word.store(make(step, value), std::memory_order_seq_cst);
    return value;
  }
};

// JoinAsCheckThenAct, when once in a while somebody came between the two: it is written over.
struct LosesMember : Steps {
  static std::uint32_t join(Word& word, std::uint32_t step, std::uint32_t bit) {
    static int count = 0;
    if (++count % 50 == 0) word.store(make(step, 0), std::memory_order_seq_cst);
    return Steps::join(word, step, bit);
  }
};

// In a process of its own: an invariant of the engine may be what finds it.
template <class Member>
void expect_red(const char* name) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    for (std::int64_t n = 0; n < kMutantSeeds; ++n) {
      const std::uint64_t seed = test::seed() + static_cast<std::uint64_t>(n);
      const std::string wrong = verdict_of<Member>(seed);
      if (wrong.empty()) continue;
      std::printf("  %-24s red after %lld seeds: %s\n", name, static_cast<long long>(n + 1),
                  wrong.c_str());
      std::fflush(stdout);
      _exit(kRed);
    }
    _exit(0);
  }
  int status = 0;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kRed) return;
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) {
    std::printf("  %-24s red: an invariant of the engine does not hold\n", name);
    return;
  }
  fail(__FILE__, __LINE__, std::string(name) + " survived the simulated world");
}

TEST_CASE(the_world_finds_each_mutant) {
  expect_red<AloneMember>("decides alone");
  expect_red<ThinkingMember<WritesOver>>("fill as check-then-act");
  expect_red<ThinkingMember<LosesMember>>("join as check-then-act");
  expect_red<ThinkingMember<LoserInsists<std::atomic>>>("the loser insists");
  expect_red<ThinkingMember<FirstIsEnough<std::atomic>>>("the first is enough");
  expect_red<ThinkingMember<StepsMixedUp<std::atomic>>>("steps mixed up");
}

}  // namespace

int main(int argc, char** argv) {
  if (const char* text = std::getenv("RRFP_SEEDS")) num_seeds = std::atoll(text);
  if (argc > 1) num_seeds = std::atoll(argv[1]);
  return test::run(1, argv);
}
