#include "runtime/decision_log.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace rrfp {

void DecisionLog::add(const Decision& decision) {
  const std::uint64_t index = count_.load(std::memory_order_relaxed);  // one writer
  const Words words = std::bit_cast<Words>(decision);
  auto& slot = words_[index % kKept];
  for (std::size_t i = 0; i < words.size(); ++i) {
    slot[i].store(words[i], std::memory_order_release);  // D1
  }
  count_.store(index + 1, std::memory_order_release);  // D1
}

std::vector<Decision> DecisionLog::last() const {
  const std::uint64_t end = count_.load(std::memory_order_acquire);  // D1
  const std::uint64_t begin = end - std::min<std::uint64_t>(end, kShownDecisions);
  std::vector<Decision> decisions;
  for (std::uint64_t index = begin; index < end; ++index) {
    Words words;
    for (std::size_t i = 0; i < words.size(); ++i) {
      words[i] = words_[index % kKept][i].load(std::memory_order_acquire);  // D1
    }
    // The decision kKept later may be in the making, before it is counted. What came before this
    // one goes as well: those that are left follow one another up to the last.
    if (count_.load(std::memory_order_acquire) >= index + kKept) {  // D1
      decisions.clear();
    } else {
      decisions.push_back(std::bit_cast<Decision>(words));
    }
  }
  return decisions;
}

std::int64_t ago_ns(const Decision& decision, std::int64_t now_ns) {
  return std::max<std::int64_t>(0, now_ns - decision.at_ns);
}

std::string passed_text(const Decision& decision) {
  switch (decision.passed_why) {
    case Blocked::kInput:
      if (decision.lacks_stage >= 0) return "lacks stage " + std::to_string(decision.lacks_stage);
      return decision.passed_kind == TaskKind::kWeightGrad ? "its I has not run"
                                                           : "its F has not run";
    case Blocked::kLimit: return "held back by the in-flight limit";
    case Blocked::kAgreement: return "not ready at every member";
    default: return "ready, but of a kind that comes later";
  }
}

std::string decisions_text(std::span<const Decision> decisions, std::int64_t now_ns) {
  std::string text;
  std::uint32_t step = 0;
  for (const Decision& d : decisions) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, " %.2f", static_cast<double>(ago_ns(d, now_ns)) / 1e9);
    const bool is_new_step = text.empty() || d.step != step;
    step = d.step;
    if (!text.empty()) text += is_new_step ? "; " : ", ";
    if (is_new_step) text += "step " + std::to_string(step) + ": ";
    text += to_text(Task{d.stage, d.kind, d.microbatch}) + seconds;
    if (d.passed_stage < 0) continue;
    text += " before " + to_text(Task{d.passed_stage, d.passed_kind, d.passed_microbatch}) + " (" +
            passed_text(d) + ")";
    if (d.overtaken > 1) text += " and " + std::to_string(d.overtaken - 1) + " more";
  }
  return text;
}

void append_decisions(std::span<const Decision> decisions, std::int64_t now_ns,
                      std::vector<std::byte>* body) {
  for (Decision decision : decisions) {
    decision.at_ns = ago_ns(decision, now_ns);
    const auto* first = reinterpret_cast<const std::byte*>(&decision);
    body->insert(body->end(), first, first + sizeof decision);
  }
}

bool parse_decisions(std::span<const std::byte> body, std::int64_t now_ns,
                     std::vector<Decision>* decisions) {
  if (body.size() % sizeof(Decision) != 0) return false;
  if (body.size() / sizeof(Decision) > kShownDecisions) return false;
  for (; !body.empty(); body = body.subspan(sizeof(Decision))) {
    Decision decision;
    std::memcpy(&decision, body.data(), sizeof decision);
    const bool is_known = decision.at_ns >= 0 && static_cast<int>(decision.kind) < kNumTaskKinds &&
                          static_cast<int>(decision.passed_kind) < kNumTaskKinds &&
                          decision.passed_why <= Blocked::kAgreement;
    if (!is_known) return false;
    decision.at_ns = now_ns - decision.at_ns;
    decisions->push_back(decision);
  }
  return true;
}

}  // namespace rrfp
