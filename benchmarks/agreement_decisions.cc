// What a decision of an agreement group costs a member.
//
//   agreement_decisions timing MEMBERS [steps]
//       A process per member, each on a core of its own, over one AgreementSegment. Prints JSON,
//       nanoseconds over all members and decisions:
//         decide  all members ask at once for a decision that can be made: claim() and commit()
//         meet    all members let a task arrive at once and spin until it is decided: what an
//                 all-gather of one integer would be called for
//         timer   two looks at the clock, contained in each of the above
//   agreement_decisions instructions MEMBERS [calls]
//       One thread plays all members in turn; for callgrind (agreement_cost.py), which counts only
//       inside measured_arrive or measured_decide. Prints how often each was called.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "arbiter/named_orders.hpp"
#include "arbiter/step_agreement.hpp"
#include "comm/agreement_segment.hpp"

namespace rrfp {
namespace {

constexpr std::int32_t kNumMicrobatches = 256;
constexpr std::int32_t kNumTasks = 2 * kNumMicrobatches;
constexpr std::int32_t kNumAhead = 4;  // forwards that wait, so that there is a choice
constexpr std::uint64_t kNonce = 1;
constexpr unsigned kDeadline_s = 120;

// One member in one step: one stage, F and B by turns, a limit.
class Member {
 public:
  Member(const AgreementSegment& segment, std::int32_t member, std::uint32_t step)
      : table_({0}, {TaskKind::kForward, TaskKind::kBackward}, kNumMicrobatches),
        given_(kNumMicrobatches),
        order_(table_, HintRule::kBackwardForward, order_of(given_)),
        arbiter_(table_, order_, {.limit_units = 8, .rounds_by_claims = true}, given_),
        group_({segment.words(step, 0), segment.words(step, 1), segment.words(step, 2)}, kNumTasks,
               member, segment.num_members(), step, &segment.bell()) {}

  [[gnu::noinline]] void measured_arrive(std::int32_t local) { group_.arrive(local); }

  // Lets arrive what the decision `last` has made possible (its backward), and forwards until
  // kNumAhead wait. -1: nothing has been decided yet.
  void arrive_after(std::int32_t last) {
    const bool was_forward = last >= 0 && last < kNumMicrobatches;
    if (was_forward) measured_arrive(last + kNumMicrobatches);
    num_forwards_decided_ += was_forward ? 1 : 0;
    while (num_forwards_ < std::min(num_forwards_decided_ + kNumAhead, kNumMicrobatches)) {
      measured_arrive(num_forwards_++);
    }
  }

  // The task decided, or -1.
  [[gnu::noinline]] std::int32_t measured_decide() {
    const Choice choice = group_.claim(arbiter_);
    if (choice.local >= 0) arbiter_.commit(choice);
    return choice.local;
  }

  std::uint64_t digest() const { return group_.digest(); }

 private:
  static std::vector<Task> order_of(std::vector<std::int32_t>& given) {
    std::iota(given.begin(), given.end(), 0);
    return one_f_one_b_order(0, 8, given);
  }

  TaskTable table_;
  std::vector<std::int32_t> given_;
  HintOrder order_;
  Arbiter arbiter_;
  GroupMember group_;
  std::int32_t num_forwards_ = 0;  // arrived
  std::int32_t num_forwards_decided_ = 0;
};

// What the processes share beside the group's own memory.
struct Shared {
  std::atomic<std::uint64_t> num_at_barrier{0};
  std::atomic<std::uint64_t> digests[kMaxAgreementMembers]{};
};

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// All come before any goes. Spins, because what follows is timed; on a machine that is busy with
// something else it also lets that run.
class Barrier {
 public:
  Barrier(Shared& shared, std::int32_t num_members) : shared_(shared), num_members_(num_members) {}

  void wait() {
    const std::uint64_t goal = ++num_rounds_ * static_cast<std::uint64_t>(num_members_);
    shared_.num_at_barrier.fetch_add(1);
    for (int spins = 1; shared_.num_at_barrier.load() < goal; ++spins) {
      if (spins % 20000 == 0) sched_yield();
    }
  }

 private:
  Shared& shared_;
  std::int32_t num_members_;
  std::uint64_t num_rounds_ = 0;
};

struct Samples {
  std::uint32_t* decide;
  std::uint32_t* meet;
  std::uint32_t* timer;
};

void run_decide(Member& member, Barrier& barrier, const Samples& samples) {
  std::int32_t decided = -1;
  for (std::int32_t k = 0; k < kNumTasks; ++k) {
    member.arrive_after(decided);
    barrier.wait();
    const std::int64_t from_ns = now_ns();
    decided = member.measured_decide();
    samples.decide[k] = static_cast<std::uint32_t>(now_ns() - from_ns);
    RRFP_INVARIANT(decided >= 0, "a decision that could be made was not");
  }
}

void run_meet(Member& member, Barrier& barrier, const Samples& samples) {
  for (std::int32_t k = 0; k < kNumTasks; ++k) {
    barrier.wait();
    const std::int64_t from_ns = now_ns();
    member.measured_arrive(k / 2 + (k % 2) * kNumMicrobatches);  // F0 B0 F1 B1 ...
    while (member.measured_decide() < 0) {
    }
    const std::int64_t to_ns = now_ns();
    samples.meet[k] = static_cast<std::uint32_t>(to_ns - from_ns);
    samples.timer[k] = static_cast<std::uint32_t>(now_ns() - to_ns);
  }
}

void pin_to(const std::vector<int>& cores, std::int32_t member) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cores[static_cast<std::size_t>(member)], &set);
  sched_setaffinity(0, sizeof set, &set);
}

std::vector<int> allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

template <class T>
T* shared_memory(std::size_t count) {
  void* const memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  RRFP_INVARIANT(memory != MAP_FAILED, "no shared memory");
  return static_cast<T*>(memory);
}

struct Timing {
  std::int32_t num_members;
  std::int32_t num_steps;
  Shared* shared;
  std::uint32_t* samples;  // [member][step][decide, meet, timer][task]

  Samples of(std::int32_t member, std::int32_t step) const {
    std::uint32_t* const at =
        samples + (static_cast<std::size_t>(member) * num_steps + step) * 3 * kNumTasks;
    return {at, at + kNumTasks, at + 2 * kNumTasks};
  }
};

// Every member of a step must have taken over the same decisions.
bool is_one_log(const Timing& timing, std::int32_t member, std::uint64_t digest,
                Barrier& barrier) {
  timing.shared->digests[member].store(digest);
  barrier.wait();
  const bool is_one = timing.shared->digests[0].load() == digest;
  barrier.wait();
  return is_one;
}

int run_member(const Timing& timing, int fd, std::int32_t member, const std::vector<int>& cores) {
  alarm(kDeadline_s);
  pin_to(cores, member);
  std::string refusal;
  const auto segment =
      AgreementSegment::open(getppid(), fd, timing.num_members, kNonce, &refusal);
  if (segment == nullptr) {
    std::fprintf(stderr, "%s\n", refusal.c_str());
    return 1;
  }
  Barrier barrier(*timing.shared, timing.num_members);
  for (std::int32_t step = 0; step < timing.num_steps; ++step) {
    const Samples samples = timing.of(member, step);
    Member first(*segment, member, 2 * static_cast<std::uint32_t>(step));
    run_decide(first, barrier, samples);
    if (!is_one_log(timing, member, first.digest(), barrier)) return 1;
    Member second(*segment, member, 2 * static_cast<std::uint32_t>(step) + 1);
    run_meet(second, barrier, samples);
    if (!is_one_log(timing, member, second.digest(), barrier)) return 1;
  }
  return 0;
}

void print_row(const char* name, std::vector<std::uint32_t> values, const char* end) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
  };
  std::printf("\"%s\": {\"p50_ns\": %u, \"p90_ns\": %u, \"p99_ns\": %u, \"p999_ns\": %u}%s", name,
              at(0.5), at(0.9), at(0.99), at(0.999), end);
}

int time_decisions(std::int32_t num_members, std::int32_t num_steps) {
  const std::vector<int> cores = allowed_cores();
  if (cores.size() < static_cast<std::size_t>(num_members)) {
    std::fprintf(stderr, "%d members need a core each; this process may use %zu\n", num_members,
                 cores.size());
    return 2;
  }
  const auto segment = AgreementSegment::create(num_members, kNonce);
  const Timing timing{num_members, num_steps, new (shared_memory<Shared>(1)) Shared,
                      shared_memory<std::uint32_t>(std::size_t{3} * kNumTasks * num_members *
                                                   num_steps)};
  for (std::int32_t member = 0; member < num_members; ++member) {
    if (fork() == 0) _exit(run_member(timing, segment->fd(), member, cores));
  }
  bool is_well = true;
  for (std::int32_t member = 0; member < num_members; ++member) {
    int status = 0;
    is_well &= wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  if (!is_well) return 1;
  std::vector<std::uint32_t> decide, meet, timer;
  for (std::int32_t member = 0; member < num_members; ++member) {
    for (std::int32_t step = 1; step < num_steps; ++step) {  // the first is cold
      const Samples samples = timing.of(member, step);
      decide.insert(decide.end(), samples.decide, samples.decide + kNumTasks);
      meet.insert(meet.end(), samples.meet, samples.meet + kNumTasks);
      timer.insert(timer.end(), samples.timer, samples.timer + kNumTasks);
    }
  }
  std::printf("{\"members\": %d, \"samples\": %zu, ", num_members, decide.size());
  print_row("decide", std::move(decide), ", ");
  print_row("meet", std::move(meet), ", ");
  print_row("timer", std::move(timer), "}\n");
  return 0;
}

int count_instructions(std::int32_t num_members, std::int64_t num_wanted) {
  const auto segment = AgreementSegment::create(num_members, kNonce);
  std::int64_t num_calls = 0;
  for (std::uint32_t step = 0; num_calls < num_wanted; ++step) {
    std::vector<std::unique_ptr<Member>> members;
    for (std::int32_t m = 0; m < num_members; ++m) {
      members.push_back(std::make_unique<Member>(*segment, m, step));
    }
    std::int32_t decided = -1;
    for (std::int32_t k = 0; k < kNumTasks; ++k) {
      for (const auto& member : members) member->arrive_after(decided);
      for (std::int32_t m = 0; m < num_members; ++m) {  // a different one is first each time
        decided = members[static_cast<std::size_t>((k + m) % num_members)]->measured_decide();
      }
      num_calls += num_members;
    }
    for (const auto& member : members) {
      RRFP_INVARIANT(member->digest() == members[0]->digest(), "two members differ");
    }
  }
  std::printf("%lld\n", static_cast<long long>(num_calls));
  return 0;
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) {
  const auto number = [&](int at, int otherwise) {
    return argc > at ? std::atoi(argv[at]) : otherwise;
  };
  const int num_members = number(2, 0);
  if (argc > 2 && num_members >= 2 && num_members <= rrfp::kMaxAgreementMembers) {
    if (std::strcmp(argv[1], "timing") == 0) {
      return rrfp::time_decisions(num_members, std::max(number(3, 40), 2));
    }
    if (std::strcmp(argv[1], "instructions") == 0) {
      return rrfp::count_instructions(num_members, number(3, 4096));
    }
  }
  std::fprintf(stderr,
               "usage: agreement_decisions timing MEMBERS [steps]\n"
               "       agreement_decisions instructions MEMBERS [calls]\n");
  return 2;
}
