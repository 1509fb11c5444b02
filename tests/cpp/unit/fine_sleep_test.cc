// Timer slack of a scope: the thread belongs to the user, and gets its own back.
#include "base/fine_sleep.hpp"

#include <sys/prctl.h>

#include "check.hpp"

namespace rrfp {
namespace {

long slack_ns() { return ::prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0); }

// Catches a scope that leaves the thread with its own slack, or changes nothing at all.
TEST_CASE(slack_is_small_inside_and_as_before_outside) {
  ::prctl(PR_SET_TIMERSLACK, 70000ul, 0, 0, 0);
  if (slack_ns() != 70000) return;  // a kernel, or a priority, without slack
  {
    const FineSleep outer;
    CHECK(slack_ns() < 70000);
    {
      const FineSleep inner;
      CHECK(slack_ns() < 70000);
    }
    CHECK(slack_ns() < 70000);
  }
  CHECK(slack_ns() == 70000);
}

// Catches a scope that makes sleeps of a thread that asked for finer ones coarser.
TEST_CASE(a_finer_slack_is_kept) {
  ::prctl(PR_SET_TIMERSLACK, 1ul, 0, 0, 0);
  if (slack_ns() != 1) return;
  {
    const FineSleep fine;
    CHECK(slack_ns() == 1);
  }
  CHECK(slack_ns() == 1);
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
