// Decisions: the last of them are kept, survive a message, and read well.
#include "runtime/decision_log.hpp"

#include <algorithm>
#include <string>

#include "check.hpp"

using namespace rrfp;

namespace {

constexpr std::int64_t kSecond = 1000000000;

Decision chosen(const char* task, std::uint32_t step, std::int64_t at_ns) {
  const Task parsed = *parse_task(task);
  Decision decision;
  decision.at_ns = at_ns;
  decision.step = step;
  decision.stage = parsed.stage;
  decision.kind = parsed.kind;
  decision.microbatch = parsed.microbatch;
  return decision;
}

Decision before(Decision decision, const char* task, Blocked why, std::int32_t lacks_stage) {
  const Task parsed = *parse_task(task);
  decision.overtaken = 1;
  decision.passed_stage = parsed.stage;
  decision.passed_kind = parsed.kind;
  decision.passed_microbatch = parsed.microbatch;
  decision.passed_why = why;
  decision.lacks_stage = lacks_stage;
  return decision;
}

}  // namespace

TEST_CASE(only_the_last_are_shown) {
  DecisionLog log;
  CHECK(log.last().empty());
  for (int i = 0; i < 200; ++i) {
    log.add(chosen("0F1", static_cast<std::uint32_t>(i), i));
    const auto last = log.last();
    CHECK(last.size() == static_cast<std::size_t>(std::min(i + 1, kShownDecisions)));
    CHECK(last.back().step == static_cast<std::uint32_t>(i));
    CHECK(last.front().step + last.size() == static_cast<std::uint32_t>(i) + 1);
  }
}

TEST_CASE(words_say_what_was_passed_over_and_why) {
  const std::int64_t now = 10 * kSecond;
  Decision third = before(chosen("1B0", 4, 9 * kSecond), "1F4", Blocked::kLimit, -1);
  third.overtaken = 3;
  const std::vector<Decision> decisions{
      chosen("1F0", 3, 7 * kSecond),
      before(chosen("1F2", 4, 8 * kSecond), "1B0", Blocked::kInput, 2), third,
      before(chosen("1F5", 4, now), "1W1", Blocked::kInput, -1),
      before(chosen("1B1", 4, now), "1F6", Blocked::kNot, -1)};
  CHECK(decisions_text(decisions, now) ==
        "step 3: 1F0 3.00; step 4: 1F2 2.00 before 1B0 (lacks stage 2), 1B0 1.00 before 1F4 (held "
        "back by the in-flight limit) and 2 more, 1F5 0.00 before 1W1 (its I has not run), 1B1 "
        "0.00 before 1F6 (ready, but of a kind that comes later)");
}

TEST_CASE(a_message_carries_them_to_another_clock) {
  const std::vector<Decision> sent{chosen("2I7", 5, 3 * kSecond),
                                   before(chosen("2F8", 5, 4 * kSecond), "2W6", Blocked::kNot, -1)};
  std::vector<std::byte> body;
  append_decisions(sent, 5 * kSecond, &body);
  std::vector<Decision> heard;
  CHECK(parse_decisions(body, 105 * kSecond, &heard) && heard.size() == 2);
  CHECK(heard[0].at_ns == 103 * kSecond && heard[1].at_ns == 104 * kSecond);
  CHECK(decisions_text(heard, 105 * kSecond) == decisions_text(sent, 5 * kSecond));
  body.clear();
  append_decisions(sent, 3 * kSecond, &body);  // the second is newer than the look at the clock
  CHECK(parse_decisions(body, 0, &heard) && heard.back().at_ns == 0);
}

TEST_CASE(damaged_ones_are_refused) {
  std::vector<std::byte> good;
  append_decisions(std::vector<Decision>{chosen("2F8", 5, kSecond)}, kSecond, &good);
  std::vector<Decision> heard;
  auto cut = good;
  cut.pop_back();
  CHECK(!parse_decisions(cut, 0, &heard));
  std::vector<std::byte> many;
  for (int i = 0; i <= kShownDecisions; ++i) many.insert(many.end(), good.begin(), good.end());
  CHECK(!parse_decisions(many, 0, &heard));
  std::vector<std::byte> wild(good.size(), std::byte{0x7f});
  heard.clear();
  CHECK(!parse_decisions(wild, 0, &heard) && heard.empty());
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
