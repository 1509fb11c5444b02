// ReadySet with more threads than cores: four producers, one worker. The worker checks the
// content of every task, not a sum: claimed exactly once, in a state in which the payload that
// its producer wrote before arrive() is there. Under ThreadSanitizer an order that is too weak
// shows as a race on the payload, and the last case sees to it that this net can go red.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <latch>
#include <random>
#include <thread>

#include "arbiter/ready_set.hpp"
#include "check.hpp"

namespace rrfp {
namespace {

constexpr int kNumProducers = 4;
constexpr const char* kWeakened = "--weakened";

// R1 taken away: the leaf bit is set without release.
struct RelaxedLeaf : ReadySteps<std::atomic> {
  static void publish(const ReadyLevels<std::atomic>& levels, std::uint32_t index) {
    levels.words[0][ready_word_of(index)].fetch_or(ready_bit_of(index),
                                                   std::memory_order_relaxed);
    ReadyLevels<std::atomic> above{.num_levels = levels.num_levels - 1};
    for (std::int32_t l = 0; l < above.num_levels; ++l) above.words[l] = levels.words[l + 1];
    ReadySteps::publish(above, ready_word_of(index));
  }
};

struct Slot {
  std::int32_t task_class, index;
  std::uint64_t payload = 0;   // written by the producer before arrive(), plain
  int claims = 0;              // by the worker
};

std::uint64_t payload_of(std::uint64_t seed, std::size_t slot) {
  return (seed ^ slot) * 0x9e3779b97f4a7c15ULL | 1;
}

// One round: every slot arrives from one of the producers, the worker claims until all are in.
template <class Set>
void run_round(std::uint64_t seed, const std::vector<std::int32_t>& tasks_per_class) {
  std::vector<Slot> slots;
  std::vector<std::size_t> first_slot;
  for (std::size_t c = 0; c < tasks_per_class.size(); ++c) {
    first_slot.push_back(slots.size());
    for (std::int32_t i = 0; i < tasks_per_class[c]; ++i) {
      slots.push_back({static_cast<std::int32_t>(c), i});
    }
  }
  std::vector<std::vector<std::size_t>> shares(kNumProducers);
  std::vector<std::size_t> shuffled(slots.size());
  for (std::size_t s = 0; s < slots.size(); ++s) shuffled[s] = s;
  std::mt19937_64 random(seed);
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  for (std::size_t n = 0; n < shuffled.size(); ++n) {
    shares[n % kNumProducers].push_back(shuffled[n]);
  }

  Set ready(tasks_per_class);
  std::atomic<int> duplicates_taken{0};
  std::latch start(kNumProducers + 1);
  std::vector<std::thread> producers;
  for (const auto& share : shares) {
    producers.emplace_back([&, seed] {
      start.arrive_and_wait();
      for (const std::size_t s : share) {
        slots[s].payload = payload_of(seed, s);
        ready.arrive(slots[s].task_class, slots[s].index);
        // A second arrival must be refused, whether the worker was there first or not.
        if (s % 7 == 0 && ready.arrive(slots[s].task_class, slots[s].index)) ++duplicates_taken;
      }
    });
  }
  start.arrive_and_wait();
  for (std::size_t claimed = 0; claimed < slots.size();) {
    for (std::int32_t c = 0; c < ready.num_classes(); ++c) {
      const std::int32_t index = ready.head(c);
      if (index < 0) continue;
      const std::size_t s = first_slot[c] + static_cast<std::size_t>(index);
      Slot& slot = slots[s];
      CHECK(ready.claim(c, index));
      CHECK(slot.payload == payload_of(seed, s));
      ++slot.claims;
      ++claimed;
    }
    if (claimed % 3 == 0) std::this_thread::yield();
  }
  for (std::thread& producer : producers) producer.join();
  CHECK(duplicates_taken == 0);
  for (const Slot& slot : slots) CHECK(slot.claims == 1);
  for (std::int32_t c = 0; c < ready.num_classes(); ++c) CHECK(ready.head(c) == -1);
}

// Small sets make producers and worker meet in one word; large ones use every level.
template <class Set>
void run_rounds(int num_rounds) {
  for (int round = 0; round < num_rounds; ++round) {
    const std::uint64_t seed = test::seed() + static_cast<std::uint64_t>(round);
    run_round<Set>(seed, {8});
    run_round<Set>(seed, {130, 3, 64});
    if (round % 10 == 0) run_round<Set>(seed, {5000, 5000});
  }
}

TEST_CASE(every_task_is_claimed_once_with_its_payload) {
  run_rounds<ReadySet<>>(test::kUnderTsan ? 300 : 1500);
}

// The mutant runs in a process of its own, because ThreadSanitizer's verdict is its exit status.
TEST_CASE(thread_sanitizer_reports_a_relaxed_leaf) {
  if (!test::kUnderTsan) {
    std::printf("  skipped: needs ThreadSanitizer (-DRRFP_SANITIZE=thread)\n");
    return;
  }
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "ready_set_stress", kWeakened, static_cast<char*>(nullptr));
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
    rrfp::run_rounds<rrfp::ReadySet<std::atomic, rrfp::RelaxedLeaf>>(20);
    return rrfp::test::failures() == 0 ? 0 : 1;
  }
  return rrfp::test::run(argc, argv);
}
