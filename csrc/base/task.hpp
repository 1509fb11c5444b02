// Task: the unit of work of a pipeline step, and its text form ("2F0": stage 2, forward,
// microbatch 0), the same in logs, errors, profiles and tests, and in torch's pipelining.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace rrfp {

enum class TaskKind : std::uint8_t {
  kForward = 0,      // F
  kBackward = 1,     // B: the full backward, input and weight gradients
  kInputGrad = 2,    // I: the input gradient alone
  kWeightGrad = 3,   // W: the weight gradient alone, after I
};

inline constexpr int kNumTaskKinds = 4;

char kind_letter(TaskKind kind);

struct Task {
  std::int32_t stage = 0;
  TaskKind kind = TaskKind::kForward;
  std::int32_t microbatch = 0;  // index in the caller's order
  friend bool operator==(const Task&, const Task&) = default;
};

// "2F0". The inverse, parse_task, accepts exactly this form and answers nullopt otherwise.
std::string to_text(const Task& task);
std::string rank_text(std::int32_t rank);  // as messages name it: "rank 2"
std::optional<Task> parse_task(std::string_view text);

}  // namespace rrfp
