#include "runtime/rank_state.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace rrfp {

namespace {

std::string waiting_text(const RankState& state) {
  if (state.stage < 0) return "waits";
  const std::string task = to_text(Task{state.stage, state.kind, state.microbatch});
  if (state.blocked == Blocked::kAgreement) {
    return "waits for " + task + ", which is ready here, but has not arrived at member " +
           std::to_string(state.source_rank) + " of its agreement group";
  }
  if (state.blocked == Blocked::kLimit) {
    return "waits: a forward is ready, but the in-flight limit holds it back; next is " + task +
           (state.source_stage < 0
                ? ""
                : ", which lacks the message of stage " + std::to_string(state.source_stage) +
                      " (rank " + std::to_string(state.source_rank) + ")");
  }
  if (state.source_stage < 0) return "waits for " + task;
  return "waits for " + task + ", which lacks the message of stage " +
         std::to_string(state.source_stage) + " (rank " + std::to_string(state.source_rank) + ")";
}

std::string activity_text(const RankState& state) {
  const std::string step = std::to_string(state.step);
  const bool is_new = state.step == kNoStep;
  switch (state.activity) {
    case Activity::kOutside:
      return is_new ? "has not entered a step" : "is outside a step, after step " + step;
    case Activity::kEntering:
      return "is entering the " + (is_new ? "first step" : "step after step " + step);
    case Activity::kWaiting: return waiting_text(state);
    case Activity::kRunning:
      if (state.stage < 0) return "is between two tasks of step " + step;
      return "is inside " + to_text(Task{state.stage, state.kind, state.microbatch});
    case Activity::kTying:
      return "has run its tasks of step " + step + " and waits for what rank " +
             std::to_string(state.source_rank) + " adds to the gradients of tied parameters";
  }
  return "is in an unknown state";
}

}  // namespace

std::vector<std::byte> to_bytes(const RankState& state) {
  std::vector<std::byte> body(sizeof state);
  std::memcpy(body.data(), &state, sizeof state);
  return body;
}

std::optional<RankState> parse_rank_state(std::span<const std::byte> body) {
  RankState state;
  if (body.size() < sizeof state) return std::nullopt;
  std::memcpy(&state, body.data(), sizeof state);
  if (state.activity > Activity::kTying || state.blocked > Blocked::kAgreement ||
      static_cast<int>(state.kind) >= kNumTaskKinds) {
    return std::nullopt;
  }
  return state;
}

std::string seconds_text(std::int64_t ms) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ms) / 1000.0);
  return text;
}

std::string to_text(const RankState& state) {
  return activity_text(state) + ", for " + seconds_text(state.since_ms) + ", " +
         std::to_string(state.num_retired) + " tasks done so far";
}

void ActivityBoard::set(Activity activity, std::int64_t now_ns) {
  stage_.store(-1, std::memory_order_relaxed);       // B2
  since_ns_.store(now_ns, std::memory_order_relaxed);  // B1
  activity_.store(activity, std::memory_order_release);  // B1
}

void ActivityBoard::set_running(const Task& task, std::int64_t now_ns) {
  set_task(task);
  since_ns_.store(now_ns, std::memory_order_relaxed);  // B1
  activity_.store(Activity::kRunning, std::memory_order_release);  // B1
}

void ActivityBoard::set_tying(std::int32_t source_rank, std::int64_t now_ns) {
  source_rank_.store(source_rank, std::memory_order_relaxed);  // B2
  set(Activity::kTying, now_ns);
}

void ActivityBoard::set_missing(Blocked blocked, const Task& task, std::int32_t source_stage,
                                std::int32_t source_rank) {
  blocked_.store(blocked, std::memory_order_relaxed);            // B2
  source_stage_.store(source_stage, std::memory_order_relaxed);  // B2
  source_rank_.store(source_rank, std::memory_order_relaxed);    // B2
  set_task(task);
}

void ActivityBoard::set_task(const Task& task) {
  kind_.store(task.kind, std::memory_order_relaxed);              // B2
  microbatch_.store(task.microbatch, std::memory_order_relaxed);  // B2
  stage_.store(task.stage, std::memory_order_relaxed);            // B2
}

RankState ActivityBoard::read(std::int64_t now_ns) const {
  RankState state;
  state.activity = activity();
  state.blocked = blocked_.load(std::memory_order_relaxed);  // B2
  state.kind = kind_.load(std::memory_order_relaxed);        // B2
  state.step = step_.load(std::memory_order_relaxed);        // B2
  state.stage = stage_.load(std::memory_order_relaxed);      // B2
  state.microbatch = microbatch_.load(std::memory_order_relaxed);      // B2
  state.source_stage = source_stage_.load(std::memory_order_relaxed);  // B2
  state.source_rank = source_rank_.load(std::memory_order_relaxed);    // B2
  state.since_ms = std::max<std::int64_t>(0, now_ns - since_ns()) / 1000000;
  state.num_retired = num_retired_.load(std::memory_order_relaxed);    // B2
  return state;
}

}  // namespace rrfp
