// One rank's arbiter for tests that name tasks by text.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "arbiter/arbiter.hpp"

namespace rrfp::test {

inline constexpr TaskKind kF = TaskKind::kForward;
inline constexpr TaskKind kB = TaskKind::kBackward;
inline constexpr TaskKind kI = TaskKind::kInputGrad;
inline constexpr TaskKind kW = TaskKind::kWeightGrad;

// A rank with stages 0..V-1, microbatches in the given order, and its tasks by text.
struct Rank {
  Rank(std::int32_t num_chunks, std::vector<TaskKind> kinds, std::int32_t num_microbatches,
       HintRule rule, const std::string& order_text, const ArbiterOptions& options,
       std::vector<std::int32_t> places = {})
      : table(stages(num_chunks), std::move(kinds), num_microbatches),
        order(table, rule, tasks(order_text)),
        times(num_chunks),
        arbiter(table, order, options, places.empty() ? stages(num_microbatches) : places,
                &times) {}

  static std::vector<std::int32_t> stages(std::int32_t count) {
    std::vector<std::int32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
  }
  static std::vector<Task> tasks(const std::string& text) {
    std::vector<Task> order;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find(' ', at), text.size());
      order.push_back(parse_task(text.substr(at, end - at)).value());
      at = end + 1;
    }
    return order;
  }

  bool arrive(const std::string& text) {
    bool all_new = true;
    for (const Task& task : tasks(text)) all_new &= arbiter.arrive(table.local(task));
    return all_new;
  }
  // What runs next, claimed; or the reason why nothing does.
  std::string next(std::int64_t now_ns = 0) {
    const Choice choice = arbiter.select(now_ns);
    overtaken = choice.overtaken;
    if (choice.wait_until_ns != 0) return "wait until " + std::to_string(choice.wait_until_ns);
    if (choice.local < 0) {
      const char* reasons[] = {"not", "input", "limit", "slack", "done", "hint"};
      return reasons[static_cast<int>(choice.blocked)];
    }
    arbiter.commit(choice);
    return to_text(table.task(choice.local));
  }
  std::string run() {  // until nothing runs
    std::string ran;
    for (;;) {
      const std::string text = next();
      ran += (ran.empty() ? "" : " ") + text;
      if (!parse_task(text)) return ran;
    }
  }

  bool announce(const std::string& text, std::int64_t now_ns, std::int64_t expected_ns) {
    return arbiter.announce({table.local(tasks(text).front()), now_ns, expected_ns});
  }

  TaskTable table;
  HintOrder order;
  TaskTimes times;
  Arbiter arbiter;
  std::int32_t overtaken = 0;
};

inline const std::string kFourByKind = "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3";

}  // namespace rrfp::test
