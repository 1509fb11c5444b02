// ReadySet with one thread: every edge of the shape, and random use against std::set.
#include "arbiter/ready_set.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "check.hpp"

namespace rrfp {
namespace {

TEST_CASE(an_empty_set_has_no_head) {
  ReadySet<> ready({1, 64, 65, 4097});
  CHECK(ready.num_classes() == 4);
  for (std::int32_t c = 0; c < 4; ++c) {
    CHECK(ready.head(c) == -1);
    CHECK(!ready.contains(c, 0));
    CHECK(!ready.claim(c, 0));
  }
}

// Catches off-by-one errors at the borders of words and of levels.
TEST_CASE(the_only_ready_task_is_found_wherever_it_stands) {
  for (const std::int32_t num_tasks : {1, 2, 63, 64, 65, 128, 4095, 4096, 4097, 262144, 262145}) {
    ReadySet<> ready({num_tasks});
    const std::int32_t stride = std::max(num_tasks / 97, 1);
    for (std::int32_t i = num_tasks - 1; i >= 0; i -= stride) {
      CHECK(ready.arrive(0, i));
      CHECK(ready.contains(0, i));
      CHECK(ready.head(0) == i);
      CHECK(ready.claim(0, i));
      CHECK(!ready.contains(0, i));
      CHECK(ready.head(0) == -1);
    }
  }
}

TEST_CASE(a_second_arrival_is_reported_and_not_applied) {
  ReadySet<> ready({100});
  CHECK(ready.arrive(0, 70));
  CHECK(!ready.arrive(0, 70));
  CHECK(ready.claim(0, 70));
  CHECK(!ready.arrive(0, 70));  // also when it has been claimed since
  CHECK(ready.head(0) == -1);
  CHECK(!ready.claim(0, 70));
}

TEST_CASE(classes_do_not_touch_one_another) {
  ReadySet<> ready({65, 65, 65});
  CHECK(ready.arrive(1, 64));
  CHECK(ready.head(0) == -1);
  CHECK(ready.head(2) == -1);
  CHECK(ready.arrive(0, 64));
  CHECK(ready.arrive(2, 0));
  CHECK(ready.claim(1, 64));
  CHECK(ready.head(0) == 64);
  CHECK(ready.head(2) == 0);
}

// Catches a claim that loses its neighbours, and a stale summary that hides later words.
TEST_CASE(claims_out_of_order_leave_the_rest) {
  ReadySet<> ready({300});
  for (std::int32_t i = 0; i < 300; ++i) CHECK(ready.arrive(0, i));
  for (std::int32_t i = 64; i < 128; ++i) CHECK(ready.claim(0, i));
  for (std::int32_t i = 0; i < 64; ++i) CHECK(ready.claim(0, i));
  CHECK(ready.head(0) == 128);
  for (std::int32_t i = 128; i < 299; ++i) CHECK(ready.claim(0, i));
  CHECK(ready.head(0) == 299);
}

void compare_with_set(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::int32_t sizes[] = {1, 5, 64, 65, 200, 5000};
  std::vector<std::int32_t> tasks_per_class(1 + random() % 3);
  for (auto& n : tasks_per_class) n = sizes[random() % 6];
  ReadySet<> ready(tasks_per_class);
  std::vector<std::set<std::int32_t>> expected(tasks_per_class.size());
  std::vector<std::set<std::int32_t>> arrived(tasks_per_class.size());
  for (int step = 0; step < 600; ++step) {
    const auto c = static_cast<std::int32_t>(random() % tasks_per_class.size());
    const auto i = static_cast<std::int32_t>(random() % tasks_per_class[c]);
    const std::int32_t first = expected[c].empty() ? -1 : *expected[c].begin();
    switch (random() % 4) {
      case 0:
      case 1: {
        const bool is_new = arrived[c].insert(i).second;
        if (is_new) expected[c].insert(i);
        CHECK(ready.arrive(c, i) == is_new);
        break;
      }
      case 2: CHECK(ready.claim(c, i) == (expected[c].erase(i) == 1)); break;
      case 3:
        CHECK(ready.head(c) == first);
        if (first >= 0) CHECK(ready.claim(c, first) && expected[c].erase(first) == 1);
        break;
    }
    CHECK(ready.contains(c, i) == (expected[c].count(i) == 1));
  }
}

TEST_CASE(random_use_equals_a_std_set) {
  for (std::uint64_t i = 0; i < 400; ++i) compare_with_set(test::seed() + i);
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
