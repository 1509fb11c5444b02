// Ranks of a chain as threads of the test, running tasks whose messages carry words that say
// whose they are. Used by the tests of RankRuntime.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "comm/local_transport.hpp"
#include "runtime/rank_runtime.hpp"

namespace rrfp::test {

inline std::shared_ptr<const StageGraph> make_chain(std::int32_t num_ranks) {
  std::vector<std::int32_t> ranks;
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  for (std::int32_t stage = 0; stage < num_ranks; ++stage) {
    ranks.push_back(stage);
    if (stage > 0) edges.emplace_back(stage - 1, stage);
  }
  return std::make_shared<StageGraph>(num_ranks, ranks, edges, std::vector<std::int32_t>{});
}

inline std::shared_ptr<const StepPlan> make_plan(std::int32_t num_ranks,
                                                 std::int32_t num_microbatches,
                                                 const std::string& hint = "bf",
                                                 std::int32_t slack = kUnlimited,
                                                 bool forward_only = false) {
  StepOptions options;
  options.num_microbatches = num_microbatches;
  options.hint = hint;
  options.slack = slack;
  options.forward_only = forward_only;
  return std::make_shared<StepPlan>(make_chain(num_ranks), options);
}

inline std::vector<std::unique_ptr<RankRuntime>> make_ranks(std::int32_t num_ranks,
                                                            RuntimeOptions options = {}) {
  std::vector<std::unique_ptr<RankRuntime>> ranks;
  for (auto& transport : make_local_transports(num_ranks)) {
    ranks.push_back(std::make_unique<RankRuntime>(std::move(transport), options));
  }
  return ranks;
}

// The word that a message of (step, from stage, target) is made of.
inline std::uint64_t word_of(std::uint32_t step, std::int32_t from_stage, const Task& target) {
  return (std::uint64_t{step} << 40) ^ (static_cast<std::uint64_t>(from_stage) << 32) ^
         (static_cast<std::uint64_t>(target.stage) << 24) ^
         (static_cast<std::uint64_t>(target.kind) << 20) ^
         static_cast<std::uint64_t>(target.microbatch) ^ 0x5bd1e995u;
}

// Messages of different microbatches differ in size.
inline std::size_t num_words_of(std::int32_t microbatch) {
  return 1 + static_cast<std::size_t>(microbatch % 5) * 9;
}

inline OutboundMessage* make_output(std::uint64_t word, std::size_t num_words) {
  auto* words = new std::vector<std::uint64_t>(num_words, word);
  auto* message = new OutboundMessage;
  message->owner = words;
  message->header.num_tensors = 1;
  message->metadata.assign(3, std::byte{7});
  message->segments.push_back(
      {reinterpret_cast<const std::byte*>(words->data()), num_words * sizeof(std::uint64_t)});
  return message;
}

// Frees what has been sent, after writing over it: a receiver that shares it would notice.
inline std::int64_t free_sent(RankRuntime& rank) {
  std::int64_t count = 0;
  for (OutboundMessage* message = rank.take_sent(); message != nullptr; ++count) {
    OutboundMessage* next = message->next;
    auto* words = static_cast<std::vector<std::uint64_t>*>(message->owner);
    if (words != nullptr) words->assign(words->size(), 0xdeadULL);
    delete words;
    delete message;
    message = next;
  }
  return count;
}

// Takes the inputs of a claimed task, checks every word, and gives them back.
inline void check_inputs(RankRuntime& rank, std::uint32_t step, std::int32_t local) {
  const Task task = rank.engine().table().task(local);
  for (InboundMessage* message : rank.take_inputs(local)) {
    if (message == nullptr) continue;
    const MessageHeader& header = message->header;
    CHECK(header.step == step && header.microbatch == task.microbatch &&
          header.target_stage == task.stage && header.kind == task.kind);
    CHECK(message->metadata.size() == 3);
    const std::size_t num_words = num_words_of(task.microbatch);
    CHECK(header.payload_bytes == padded_bytes(num_words * sizeof(std::uint64_t)));
    for (std::size_t at = 0; at < header.payload_bytes / sizeof(std::uint64_t); ++at) {
      std::uint64_t word = 0;
      std::memcpy(&word, message->payload + at * sizeof word, sizeof word);
      CHECK(word == (at < num_words ? word_of(step, header.source_stage, task) : 0));
    }
    RankRuntime::release(message);
  }
}

struct RankOutcome {
  ClaimOutcome outcome = ClaimOutcome::kTimeout;
  StepTimes times;
  std::vector<Task> ran;
};

// Runs one step on one rank; `inside` is called in each task, `stop_after` tasks are run at most.
inline RankOutcome run_step(RankRuntime& rank, std::shared_ptr<const StepPlan> plan,
                            std::uint32_t step, std::int64_t stall_timeout_ms,
                            const std::function<void(const Task&)>& inside = {},
                            std::size_t stop_after = SIZE_MAX) {
  RankOutcome result;
  rank.begin_step(plan, step, stall_timeout_ms);
  while (result.ran.size() < stop_after) {
    const ClaimResult claimed = rank.claim(100);
    result.outcome = claimed.outcome;
    free_sent(rank);
    if (claimed.outcome == ClaimOutcome::kTimeout) continue;
    if (claimed.outcome != ClaimOutcome::kTask) break;
    const Task task = rank.engine().table().task(claimed.local);
    check_inputs(rank, step, claimed.local);
    if (inside) inside(task);
    for (const std::int32_t stage : plan->graph().targets_of(task)) {
      const Task target{stage, task.kind, task.microbatch};
      rank.post_output(claimed.local, stage,
                       make_output(word_of(step, task.stage, target),
                                   num_words_of(task.microbatch)));
    }
    rank.retire(claimed.local);
    result.ran.push_back(task);
  }
  if (result.outcome == ClaimOutcome::kDone) {
    CHECK(rank.wait_sends(20000) || !rank.status().ok());
  }
  free_sent(rank);
  result.times = rank.end_step();
  return result;
}

// Ends a rank as its owner does: goodbye, then everything that nobody took.
inline void close_rank(RankRuntime& rank) {
  rank.close(2000);
  free_sent(rank);
  for (InboundMessage* message : rank.drain()) RankRuntime::release(message);
}

inline void on_each(std::vector<std::unique_ptr<RankRuntime>>& ranks,
                    const std::function<void(RankRuntime&)>& body) {
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&body, &rank] { body(*rank); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace rrfp::test
