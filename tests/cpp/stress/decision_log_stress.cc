// DecisionLog: readers beside a writer that never rests see whole decisions, in order.
// Would catch: a decision put together of two, and, under ThreadSanitizer, a plain access.
#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"
#include "runtime/decision_log.hpp"

using namespace rrfp;

namespace {

constexpr std::uint32_t kNumDecisions = 300000;

// Every field follows from the number.
Decision numbered(std::uint32_t number) {
  Decision decision;
  decision.at_ns = std::int64_t{number} * 3;
  decision.step = number;
  decision.stage = static_cast<std::int32_t>(number + 1);
  decision.microbatch = static_cast<std::int32_t>(number + 2);
  decision.overtaken = static_cast<std::int32_t>(number + 3);
  decision.lacks_stage = static_cast<std::int32_t>(number + 4);
  return decision;
}

bool is_whole(const Decision& decision) {
  const Decision expected = numbered(decision.step);
  return decision.at_ns == expected.at_ns && decision.stage == expected.stage &&
         decision.microbatch == expected.microbatch &&
         decision.overtaken == expected.overtaken &&
         decision.lacks_stage == expected.lacks_stage;
}

}  // namespace

TEST_CASE(readers_see_whole_decisions_in_order) {
  DecisionLog log;
  std::atomic<bool> is_over{false};
  std::atomic<std::int64_t> num_seen{0};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&] {
      std::uint32_t latest = 0;
      while (!is_over.load(std::memory_order_relaxed)) {
        const auto decisions = log.last();
        for (std::size_t i = 0; i < decisions.size(); ++i) {
          CHECK(is_whole(decisions[i]));
          if (i > 0) CHECK(decisions[i].step == decisions[i - 1].step + 1);
        }
        if (decisions.empty()) continue;
        CHECK(decisions.back().step >= latest);
        latest = decisions.back().step;
        num_seen.fetch_add(1, std::memory_order_relaxed);
      }
    });
  }
  for (std::uint32_t number = 0; number < kNumDecisions; ++number) {
    log.add(numbered(number));
    if (number % 64 == 0) std::this_thread::yield();
  }
  is_over.store(true, std::memory_order_relaxed);
  for (auto& reader : readers) reader.join();
  CHECK(num_seen.load(std::memory_order_relaxed) > 0);
  CHECK(log.last().size() == static_cast<std::size_t>(kShownDecisions));
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
