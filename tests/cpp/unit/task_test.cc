// Task names: the text form is the one users type in orders and search for in profiles.
#include "base/task.hpp"

#include <random>

#include "check.hpp"

namespace rrfp {
namespace {

// Catches a swapped letter table: the letters are part of the public text form.
TEST_CASE(task_text_is_stage_letter_microbatch) {
  CHECK(to_text({2, TaskKind::kForward, 0}) == "2F0");
  CHECK(to_text({0, TaskKind::kBackward, 13}) == "0B13");
  CHECK(to_text({17, TaskKind::kInputGrad, 4}) == "17I4");
  CHECK(to_text({3, TaskKind::kWeightGrad, 2147483647}) == "3W2147483647");
}

TEST_CASE(parsing_inverts_text) {
  std::mt19937_64 random(test::seed());
  for (int i = 0; i < 2000; ++i) {
    const Task task{static_cast<std::int32_t>(random() % 1000),
                    static_cast<TaskKind>(random() % kNumTaskKinds),
                    static_cast<std::int32_t>(random() % 100000)};
    const auto parsed = parse_task(to_text(task));
    CHECK(parsed.has_value() && *parsed == task);
  }
}

// Catches a lenient parser: an order with a slip in it must not pass as another task.
TEST_CASE(parsing_refuses_everything_else) {
  for (const char* text : {"", "F", "2F", "F0", "2X0", "2f0", " 2F0", "2F0 ", "2 F0", "-1F0",
                           "+1F0", "2F-1", "2F+1", "2FF0", "2F0B", "2F0,2B0", "2.0F1", "0x1F0",
                           "2147483648F0", "0F2147483648", "2F0\n"}) {
    CHECK(!parse_task(text).has_value());
  }
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
