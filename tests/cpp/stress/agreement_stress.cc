// AgreementLog with more threads than cores: each member has two threads that let tasks arrive,
// in seeded orders, and a worker that proposes what it likes. The workers check the content of
// every task: that its own threads' plain writes from before arrive() are there, and that all
// members took over the same decisions, step after step on the same words. Under ThreadSanitizer
// an order that is too weak shows as a race, and the last case sees to it that it can.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "arbiter/step_agreement.hpp"
#include "check.hpp"

namespace rrfp {
namespace {

constexpr const char* kWeakened = "--weakened";

using Steps = AgreementSteps<std::atomic>;

// L1 taken away: what a member wrote before it joined is not passed on.
struct RelaxedJoin : Steps {
  static std::uint32_t join(std::atomic<AgreementWord>& word, std::uint32_t step,
                            std::uint32_t bit) {
    AgreementWord before = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_strong(before, make(step, value_of(before, step) | bit),
                                         std::memory_order_relaxed)) {
    }
    return value_of(before, step);
  }
};

std::uint64_t payload_of(std::uint64_t seed, std::size_t member, std::int32_t task) {
  return (seed ^ (member << 20) ^ static_cast<std::uint64_t>(task)) * 0x9e3779b97f4a7c15ULL | 1;
}

template <class Log>
struct Member {
  std::unique_ptr<Log> log;
  std::vector<std::uint64_t> payload;  // by task; written by its threads before arrive(), plain
  std::vector<std::int32_t> taken;
};

template <class Log>
void work(Member<Log>& self, std::size_t m, std::int32_t num_tasks, std::uint64_t seed,
          SharedEventCount& bell) {
  std::mt19937_64 random(seed + m);
  std::vector<std::int32_t> seen;
  const auto feed = [&] {
    for (std::int32_t task; (task = self.log->next_ready()) >= 0;) seen.push_back(task);
  };
  while (self.taken.size() < static_cast<std::size_t>(num_tasks)) {
    const std::uint32_t ticket = bell.prepare();
    std::int32_t decided = self.log->adopted();
    feed();
    if (decided < 0 && seen.empty()) {
      bell.wait(ticket, 1000000000);
      continue;
    }
    if (decided < 0) {
      decided = self.log->propose(seen[random() % seen.size()]);
      bell.notify();
      feed();
    }
    const auto at = std::find(seen.begin(), seen.end(), decided);
    CHECK(at != seen.end());
    if (at == seen.end()) return;
    seen.erase(at);
    CHECK(self.payload[decided] == payload_of(seed, m, decided));
    self.taken.push_back(decided);
    if (random() % 5 == 0) std::this_thread::yield();
  }
}

template <class Log>
void run_step(std::vector<std::atomic<AgreementWord>>& words, std::int32_t num_tasks,
              std::size_t num_members, std::uint32_t step, std::uint64_t seed) {
  const std::size_t stride = words.size() / 3;
  const AgreementWords<std::atomic> arrays{words.data(), words.data() + stride,
                                           words.data() + 2 * stride};
  SharedEventCount bell;
  std::vector<Member<Log>> members(num_members);
  std::vector<std::vector<std::int32_t>> orders(num_members);
  std::mt19937_64 random(seed);
  for (std::size_t m = 0; m < num_members; ++m) {
    members[m].log = std::make_unique<Log>(arrays, num_tasks, static_cast<std::int32_t>(m),
                                           static_cast<std::int32_t>(num_members), step);
    members[m].payload.resize(num_tasks);
    orders[m].resize(num_tasks);
    std::iota(orders[m].begin(), orders[m].end(), 0);
    std::shuffle(orders[m].begin(), orders[m].end(), random);
  }
  std::vector<std::thread> threads;
  for (std::size_t m = 0; m < num_members; ++m) {
    for (std::size_t half = 0; half < 2; ++half) {
      threads.emplace_back([&, m, half] {
        for (std::size_t n = half; n < orders[m].size(); n += 2) {
          const std::int32_t task = orders[m][n];
          members[m].payload[task] = payload_of(seed, m, task);
          if (members[m].log->arrive(task)) bell.notify();
        }
      });
    }
    threads.emplace_back([&, m] { work(members[m], m, num_tasks, seed, bell); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Member<Log>& member : members) CHECK(member.taken == members[0].taken);
}

template <class Log>
void run_steps(int num_steps) {
  std::vector<std::atomic<AgreementWord>> words(3 * 200);
  for (int step = 0; step < num_steps; ++step) {
    const std::uint64_t seed = test::seed() + static_cast<std::uint64_t>(step);
    run_step<Log>(words, step % 4 == 0 ? 200 : 7, 2 + step % 3, step, seed);
  }
}

TEST_CASE(members_take_over_one_log_with_their_own_inputs) {
  run_steps<AgreementLog<>>(test::kUnderTsan ? 150 : 600);
}

TEST_CASE(thread_sanitizer_reports_a_relaxed_join) {
  if (!test::kUnderTsan) {
    std::printf("  skipped: needs ThreadSanitizer (-DRRFP_SANITIZE=thread)\n");
    return;
  }
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "agreement_stress", kWeakened, static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 66);  // ThreadSanitizer's own exit status
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], rrfp::kWeakened) == 0) {
    std::freopen("/dev/null", "w", stderr);  // the report is expected, the exit status counts
    rrfp::run_steps<rrfp::AgreementLog<std::atomic, rrfp::RelaxedJoin>>(40);
    return rrfp::test::failures() == 0 ? 0 : 1;
  }
  return rrfp::test::run(argc, argv);
}
