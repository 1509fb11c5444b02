// LaunchPacer against a simulated device and host, over random durations and costs of launches:
// what choosing just in time costs the device, and how much later it chooses.
//
// The bound holds by induction. Launched at once, task n begins at max(launched, end before).
// A choice just in time adds a wait until `due`, which is the end of the running task less its
// launch, wrong by how far the task, the launch and the look are from what was learnt. Begins and
// ends are maxima and sums, so errors add up at the most: idle(jit) <= idle(eager) + their sum.
//
// Mutants of launch_pacer.cc that were seen to fail here: wide intervals teach nothing (tasks get
// shorter, and the device waits for every launch), the longest task or the cheapest launch counts,
// a task begins when its launch is over, kEager is kJit.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "check.hpp"
#include "runtime/launch_pacer.hpp"

using namespace rrfp;

namespace {

constexpr int kNumTasks = 360;
constexpr int kDriftAt = kNumTasks / 3;
constexpr int kJudgedFrom = 2 * kNumTasks / 3;
constexpr std::int64_t kLookNs = 20'000;
constexpr std::int64_t kSpinNs = 1'000;

struct Work {
  TaskKind kind;
  std::int64_t launch_ns, device_ns;
};

// Two kinds, each with its own times, which vary evenly around a mean by a share of it; the
// device's change once, by `drift`.
struct Setting {
  std::int64_t launch_ns[2], device_ns[2];
  double launch_noise, device_noise, drift;

  std::int64_t dearest_ns() const { return std::max(launch_ns[0], launch_ns[1]); }
};

struct Outcome {
  std::int64_t idle_ns = 0;  // of the device, between tasks
  std::int64_t lead_ns = 0;  // from the choice of a task to the end of the one before it
};

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  double between(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_);
  }
  template <std::size_t N>
  double one_of(const double (&values)[N]) { return values[random_() % N]; }
  bool coin() { return random_() % 2 == 0; }

 private:
  std::mt19937_64 random_;
};

Setting draw_setting(Draw& draw) {
  Setting setting{};
  const double share = draw.one_of({0.02, 0.1, 0.5, 1.0, 2.0});
  for (int kind = 0; kind < 2; ++kind) {
    setting.device_ns[kind] = static_cast<std::int64_t>(draw.between(0.5e6, 20e6));
    setting.launch_ns[kind] = static_cast<std::int64_t>(
        static_cast<double>(setting.device_ns[kind]) * share * draw.between(0.8, 1.2));
  }
  setting.launch_noise = draw.one_of({0.0, 0.1, 0.3});
  setting.device_noise = draw.one_of({0.0, 0.05, 0.3});
  setting.drift = draw.one_of({1.0, 1.0, 0.3, 3.0});
  return setting;
}

std::vector<Work> draw_work(const Setting& setting, Draw& draw) {
  std::vector<Work> work;
  for (int i = 0; i < kNumTasks; ++i) {
    const bool second = draw.coin();
    const auto times = [&](std::int64_t mean_ns, double noise) {
      return static_cast<std::int64_t>(static_cast<double>(mean_ns) *
                                       draw.between(1 - noise, 1 + noise));
    };
    const double drift = i < kDriftAt ? 1 : setting.drift;
    work.push_back({second ? TaskKind::kBackward : TaskKind::kForward,
                    times(setting.launch_ns[second], setting.launch_noise),
                    times(static_cast<std::int64_t>(
                              static_cast<double>(setting.device_ns[second]) * drift),
                          setting.device_noise)});
  }
  return work;
}

Outcome run(const std::vector<Work>& work, Lookahead lookahead, Draw draw) {
  LaunchPacer pacer(1);
  pacer.begin_step(TaskTable({0}, {TaskKind::kForward, TaskKind::kBackward}, kNumTasks),
                   lookahead);
  Outcome outcome;
  std::vector<std::int64_t> ends;
  std::int64_t now_ns = 1'000'000;
  for (int i = 0; i < kNumTasks; ++i) {
    const std::int64_t before_ns = ends.empty() ? now_ns : ends.back();
    if (i >= kJudgedFrom) outcome.lead_ns += std::max<std::int64_t>(0, before_ns - now_ns);
    pacer.claimed(work[i].kind, 0, now_ns, false);
    now_ns += work[i].launch_ns;
    pacer.launched(now_ns);
    const std::int64_t begin_ns = std::max(now_ns, before_ns);
    if (i >= kJudgedFrom) outcome.idle_ns += begin_ns - before_ns;
    ends.push_back(begin_ns + work[i].device_ns);
    while (true) {
      const auto ended = std::upper_bound(ends.begin(), ends.end(), now_ns);
      pacer.look(now_ns, static_cast<std::size_t>(ends.end() - ended));
      if (pacer.may_choose(now_ns)) break;
      const bool is_near = pacer.choose_from_ns() - now_ns < 2 * kLookNs;
      now_ns += is_near ? kSpinNs : static_cast<std::int64_t>(draw.between(5'000, kLookNs));
    }
  }
  return outcome;
}

// The most by which tasks, launches and looks can differ from what was expected.
std::int64_t most_error_ns(const Setting& setting, const std::vector<Work>& work) {
  double error_ns = 0;
  for (int i = kJudgedFrom - 1; i < kNumTasks; ++i) {
    const bool second = work[i].kind == TaskKind::kBackward;
    error_ns += 2 * setting.device_noise * setting.drift *
                static_cast<double>(setting.device_ns[second]);
    error_ns += 2 * setting.launch_noise * static_cast<double>(setting.launch_ns[second]);
    error_ns += kSpinNs;
  }
  return static_cast<std::int64_t>(error_ns) + kLookNs;
}

}  // namespace

TEST_CASE(the_device_idles_no_longer_than_expectations_are_wrong) {
  int num_later = 0;
  for (std::uint64_t i = 0; i < 60; ++i) {
    Draw draw(test::seed() + i);
    const Setting setting = draw_setting(draw);
    const std::vector<Work> work = draw_work(setting, draw);
    const Outcome eager = run(work, Lookahead::kEager, draw);
    const Outcome jit = run(work, Lookahead::kJit, draw);
    const bool is_kept = jit.idle_ns <= eager.idle_ns + most_error_ns(setting, work);
    const bool is_late = jit.lead_ns <= eager.lead_ns + (kNumTasks - kJudgedFrom) * kLookNs;
    if (!is_kept || !is_late) {
      std::printf("seed %llu: idle %.1f and %.1f ms (error %.1f), lead %.1f and %.1f ms\n",
                  static_cast<unsigned long long>(test::seed() + i), 1e-6 * jit.idle_ns,
                  1e-6 * eager.idle_ns, 1e-6 * most_error_ns(setting, work), 1e-6 * jit.lead_ns,
                  1e-6 * eager.lead_ns);
    }
    CHECK(is_kept);
    CHECK(is_late);
    num_later += 2 * jit.lead_ns < eager.lead_ns;
  }
  CHECK(num_later > 10);
}

// How late is "just in time": no earlier than the launch to come, one that the device may have
// waited for before it began, what tasks and launches vary, how wide a narrow interval is, and
// looks add up to.
TEST_CASE(choices_are_made_a_launch_before_the_end) {
  for (std::uint64_t i = 0; i < 60; ++i) {
    Draw draw(test::seed() + 1000 + i);
    const Setting setting = draw_setting(draw);
    const std::vector<Work> work = draw_work(setting, draw);
    const Outcome jit = run(work, Lookahead::kJit, draw);
    const auto longest_ns =
        setting.drift * static_cast<double>(std::max(setting.device_ns[0], setting.device_ns[1]));
    const double most_ns = (2 + 3 * setting.launch_noise) *
                               static_cast<double>(setting.dearest_ns()) +
                           (2 * setting.device_noise + 1.0 / LaunchPacer::kWidest) * longest_ns +
                           LaunchPacer::kAheadNs + 2 * kLookNs;
    if (static_cast<double>(jit.lead_ns) > (kNumTasks - kJudgedFrom) * most_ns) {
      std::printf("seed %llu: lead %.2f ms, at most %.2f; launches %.2f %.2f (%.2f), tasks %.2f "
                  "%.2f (%.2f), drift %.1f\n",
                  static_cast<unsigned long long>(test::seed() + 1000 + i),
                  1e-6 * static_cast<double>(jit.lead_ns) / (kNumTasks - kJudgedFrom),
                  1e-6 * most_ns, 1e-6 * setting.launch_ns[0], 1e-6 * setting.launch_ns[1],
                  setting.launch_noise, 1e-6 * setting.device_ns[0], 1e-6 * setting.device_ns[1],
                  setting.device_noise, setting.drift);
    }
    CHECK(static_cast<double>(jit.lead_ns) <= (kNumTasks - kJudgedFrom) * most_ns);
  }
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
