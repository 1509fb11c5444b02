// EventQueue: in the order of a sorted list, whatever the times are; it must not let two events
// of one instant pass one another, nor lose one that is due at once.
#include "runtime/event_queue.hpp"

#include <cstddef>
#include <random>
#include <set>
#include <utility>

#include "check.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

struct Event {
  std::int64_t at_ns = 0;
  std::int64_t number = 0;
};

// Nobody wants to know.
void ignore(const Event&, std::size_t) {}

}  // namespace

TEST_CASE(events_come_in_order_of_time_and_of_push) {
  // From every event at one instant to hardly any two together.
  for (const std::int64_t span_ns : {1LL, 3LL, 100LL, 1000000000LL, 1LL << 50}) {
    std::mt19937_64 random(seed() + span_ns);
    EventQueue<Event> queue;
    std::set<std::pair<std::int64_t, std::int64_t>> expected;
    const auto pop = [&] {
      const Event event = queue.pop(ignore);
      CHECK(std::pair(event.at_ns, event.number) == *expected.begin());
      CHECK(queue.now_ns() == event.at_ns);
      expected.erase(expected.begin());
      CHECK(queue.is_any_due() == (!expected.empty() && expected.begin()->first == event.at_ns));
    };
    std::int64_t number = 0;
    for (int turn = 0; turn < 4000; ++turn) {
      for (auto left = static_cast<int>(random() % 4); left > 0; --left) {
        // One in four is due at the present moment.
        const std::int64_t after_ns =
            random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % span_ns);
        queue.push({queue.now_ns() + after_ns, number});
        expected.emplace(queue.now_ns() + after_ns, number++);
      }
      CHECK(queue.empty() == expected.empty());
      if (!queue.empty()) pop();
    }
    while (!expected.empty()) pop();
    CHECK(queue.empty());
  }
}

TEST_CASE(what_is_pushed_for_the_present_comes_before_what_was_pushed_for_later) {
  EventQueue<Event> queue;
  queue.push({10, 0});
  queue.push({20, 1});
  CHECK(queue.pop(ignore).number == 0);
  CHECK(!queue.is_any_due());
  queue.push({15, 2});
  queue.push({10, 3});
  CHECK(queue.is_any_due());
  CHECK(queue.pop(ignore).number == 3);
  CHECK(queue.pop(ignore).number == 2);
  CHECK(queue.pop(ignore).number == 1);
  CHECK(queue.empty());
}

TEST_CASE(what_comes_soon_is_told_before_it_comes) {
  std::mt19937_64 random(seed());
  EventQueue<Event> queue;
  std::set<std::int64_t> told;
  const auto tell = [&](const Event& event, std::size_t within) {
    CHECK(within >= 1 && within <= 64);
    CHECK(event.at_ns >= queue.now_ns());
    told.insert(event.number);
  };
  constexpr int kNumEvents = 4000;
  for (std::int64_t number = 0; number < kNumEvents; ++number) {
    queue.push({static_cast<std::int64_t>(random() % 1000000), number});
  }
  int num_told = 0;
  while (!queue.empty()) num_told += told.contains(queue.pop(tell).number) ? 1 : 0;
  CHECK(num_told > kNumEvents * 3 / 4);
}

int main(int argc, char** argv) { return run(argc, argv); }
