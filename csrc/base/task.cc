#include "base/task.hpp"

#include <charconv>

namespace rrfp {

namespace {
constexpr std::string_view kLetters = "FBIW";

// Digits only: from_chars alone would also take a sign.
std::optional<std::int32_t> parse_index(std::string_view digits) {
  std::int32_t value = 0;
  const char* end = digits.data() + digits.size();
  if (digits.empty() || digits.front() < '0' || digits.front() > '9') return std::nullopt;
  auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return value;
}
}  // namespace

char kind_letter(TaskKind kind) { return kLetters[static_cast<std::size_t>(kind)]; }

std::string rank_text(std::int32_t rank) { return "rank " + std::to_string(rank); }

std::string to_text(const Task& task) {
  return std::to_string(task.stage) + kind_letter(task.kind) + std::to_string(task.microbatch);
}

std::optional<Task> parse_task(std::string_view text) {
  const std::size_t at = text.find_first_of(kLetters);
  if (at == std::string_view::npos) return std::nullopt;
  const auto stage = parse_index(text.substr(0, at));
  const auto microbatch = parse_index(text.substr(at + 1));
  if (!stage || !microbatch) return std::nullopt;
  return Task{*stage, static_cast<TaskKind>(kLetters.find(text[at])), *microbatch};
}

}  // namespace rrfp
