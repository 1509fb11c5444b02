// StepClock: every instant in one part, and a wait for inputs split where the input was computed.
// Would catch: a part counted twice, a transfer that reaches beyond the wait, one booked for an
// input of this rank's own.
#include "runtime/step_clock.hpp"

#include <numeric>
#include <random>

#include "check.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

std::int64_t sum_of_parts(const StepTimes& t) {
  return t.compute_ns + t.idle_warmup_ns + t.idle_input_ns + t.idle_transfer_ns +
         t.idle_limit_ns + t.idle_slack_ns + t.idle_agreement_ns + t.host_ns;
}

// A wait for an input from 10 to 30, the input of rank 1 computed at computed_ns.
StepTimes wait_of_20(std::int64_t computed_ns, std::int32_t source_rank = 1) {
  StepClock clock;
  clock.begin(2, 0);
  clock.claimed({}, 1);
  clock.retired(10);
  clock.blocked(Blocked::kInput, 10);
  clock.claimed({computed_ns, source_rank}, 30);
  clock.retired(100);
  return clock.end(101);
}

}  // namespace

TEST_CASE(a_wait_is_split_where_its_input_was_computed) {
  CHECK(wait_of_20(24).idle_input_ns == 14 && wait_of_20(24).idle_transfer_ns == 6);
  CHECK(wait_of_20(24).transfer_from_ns == std::vector<std::int64_t>({0, 6}));
  CHECK(wait_of_20(5).idle_input_ns == 0 && wait_of_20(5).idle_transfer_ns == 20);
  CHECK(wait_of_20(30).idle_input_ns == 20 && wait_of_20(30).idle_transfer_ns == 0);
  CHECK(wait_of_20(24, -1).idle_input_ns == 20 && wait_of_20(24, -1).idle_transfer_ns == 0);
  CHECK(sum_of_parts(wait_of_20(24)) == 101);
}

// A forward comes at 20 and is held back by the limit; the backward that runs at 40 was computed
// at 15: what lies under the limit stays there.
TEST_CASE(only_waits_for_inputs_are_split) {
  StepClock clock;
  clock.begin(3, 0);
  clock.claimed({}, 0);
  clock.retired(10);
  clock.blocked(Blocked::kInput, 10);
  clock.blocked(Blocked::kInput, 12);
  clock.blocked(Blocked::kLimit, 20);
  clock.blocked(Blocked::kInput, 35);
  clock.claimed({15, 2}, 40);
  clock.retired(50);
  clock.blocked(Blocked::kInput, 50);
  clock.claimed({0, 1}, 53);  // the waits before are over
  clock.retired(60);
  const StepTimes times = clock.end(60);
  CHECK(times.idle_input_ns == 5 && times.idle_limit_ns == 15);
  CHECK(times.transfer_from_ns == std::vector<std::int64_t>({0, 3, 10}));
  CHECK(times.idle_transfer_ns == 13 && sum_of_parts(times) == times.wall_ns);
}

TEST_CASE(what_the_first_task_waits_for_is_warm_up_or_transfer) {
  StepClock clock;
  for (int step = 0; step < 2; ++step) {
    clock.begin(2, 0);
    clock.blocked(Blocked::kInput, 0);
    clock.blocked(Blocked::kLimit, 8);
    clock.blocked(Blocked::kInput, 10);
    clock.claimed({25, 1}, 30);
    clock.retired(40);
    clock.blocked(Blocked::kInput, 40);
    clock.claimed({}, 47);
    const StepTimes times = clock.end(50);
    CHECK(times.idle_warmup_ns == 23 && times.idle_transfer_ns == 5 && times.idle_input_ns == 7);
    CHECK(times.idle_limit_ns == 2 && sum_of_parts(times) == times.wall_ns);
  }
}

// Whatever happens when, against a clock that books each nanosecond by itself.
TEST_CASE(random_steps_equal_a_clock_of_single_nanoseconds) {
  std::mt19937_64 random(seed());
  const auto draw = [&](std::int64_t most) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most + 1));
  };
  StepClock clock;
  for (int round = 0; round < 500; ++round) {
    std::int64_t now_ns = 1000, input_ns = 0, other_idle_ns = 0;
    std::vector<std::int64_t> from_ns(3, 0);
    clock.begin(3, now_ns);
    for (int task = 0; task < 20; ++task) {
      std::vector<std::int64_t> waited;  // the nanoseconds waited for inputs
      for (std::int64_t looks = draw(4); looks > 0; --looks) {
        const Blocked why = std::array{Blocked::kInput, Blocked::kInput, Blocked::kLimit,
                                       Blocked::kHint, Blocked::kAgreement}[draw(4)];
        clock.blocked(why, now_ns);
        const std::int64_t passed_ns = draw(20);
        for (std::int64_t i = 0; i < passed_ns; ++i, ++now_ns) {
          if (why == Blocked::kInput) waited.push_back(now_ns);
          other_idle_ns += why != Blocked::kInput;
        }
      }
      const Transfer transfer{now_ns - draw(60), static_cast<std::int32_t>(draw(3)) - 1};
      for (const std::int64_t at_ns : waited) {
        const bool is_transfer = transfer.source_rank >= 0 && at_ns >= transfer.from_ns;
        ++(is_transfer ? from_ns[transfer.source_rank] : input_ns);
      }
      clock.claimed(transfer, now_ns);
      now_ns += draw(30);
      clock.retired(now_ns);
      now_ns += draw(2);
    }
    const StepTimes times = clock.end(now_ns);
    CHECK(times.idle_warmup_ns + times.idle_input_ns == input_ns);
    CHECK(times.transfer_from_ns == from_ns);
    CHECK(times.idle_transfer_ns == std::accumulate(from_ns.begin(), from_ns.end(), 0L));
    CHECK(times.idle_limit_ns + times.idle_slack_ns + times.idle_agreement_ns == other_idle_ns);
    CHECK(sum_of_parts(times) == times.wall_ns && times.wall_ns == now_ns - 1000);
  }
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
