// RankRuntime over LocalTransport: steps, early and late messages, and every way a step ends.
#include "runtime/rank_runtime.hpp"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "check.hpp"
#include "tiny_pipeline.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

constexpr std::int64_t kNoStall = 60000;
constexpr RuntimeOptions kQuick{.heartbeat_ms = 20, .peer_timeout_ms = 60000};

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("  \"%s\" is not in: %s\n", part.c_str(), text.c_str());
  return false;
}

std::int64_t sum_of_parts(const StepTimes& times) {
  return times.compute_ns + times.idle_warmup_ns + times.idle_input_ns + times.idle_transfer_ns +
         times.idle_limit_ns + times.idle_slack_ns + times.host_ns;
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace

TEST_CASE(steps_run_to_the_end_and_times_add_up) {
  auto ranks = make_ranks(3);
  const auto plan = make_plan(3, 5);
  on_each(ranks, [&](RankRuntime& rank) {
    for (std::uint32_t step = 7; step < 12; ++step) {
      const RankOutcome result = run_step(rank, plan, step, kNoStall, [&](const Task& task) {
        if (task.stage == 2) sleep_ms(1);
      });
      CHECK(result.outcome == ClaimOutcome::kDone && result.ran.size() == 10);
      CHECK(sum_of_parts(result.times) == result.times.wall_ns);
      CHECK(result.times.compute_ns > 0 && result.times.host_ns > 0);
      if (rank.rank() == 0) CHECK(result.times.idle_input_ns > 0);
    }
    CHECK(rank.num_late() == 0 && rank.status().ok());
  });
  on_each(ranks, close_rank);
}

TEST_CASE(idle_time_is_booked_by_its_cause) {
  auto ranks = make_ranks(2);
  StepOptions options;
  options.num_microbatches = 4;
  options.hint = "f-priority";
  options.limits = {1, 1};
  const auto tight = std::make_shared<StepPlan>(make_chain(2), options);
  const auto fixed = make_plan(2, 4, "1f1b", 0);
  on_each(ranks, [&](RankRuntime& rank) {
    const auto slow_last = [](const Task& task) { sleep_ms(task.stage == 1 ? 3 : 0); };
    const StepTimes limited = run_step(rank, tight, 0, kNoStall, slow_last).times;
    const StepTimes ordered = run_step(rank, fixed, 1, kNoStall, slow_last).times;
    if (rank.rank() != 0) return;
    CHECK(limited.idle_limit_ns > limited.idle_input_ns && limited.idle_slack_ns == 0);
    CHECK(ordered.idle_slack_ns > 0 && ordered.idle_limit_ns == 0);
  });
  on_each(ranks, close_rank);
}

TEST_CASE(one_rank_needs_no_peer) {
  auto ranks = make_ranks(1);
  const RankOutcome result = run_step(*ranks[0], make_plan(1, 3), 0, kNoStall);
  CHECK(result.outcome == ClaimOutcome::kDone && result.ran.size() == 6);
  ranks[0]->send_control(0, {std::byte{1}});
  CHECK(ranks[0]->recv_control(0, 0).has_value());
  close_rank(*ranks[0]);
}

TEST_CASE(stages_of_one_rank_hand_over_directly) {
  auto ranks = make_ranks(1);
  const auto graph = std::make_shared<StageGraph>(
      1, std::vector<std::int32_t>{0, 0},
      std::vector<std::pair<std::int32_t, std::int32_t>>{{0, 1}}, std::vector<std::int32_t>{});
  StepOptions options;
  options.num_microbatches = 2;
  options.hint = "order";
  for (const char* text : {"0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"}) {
    options.order.push_back(*parse_task(text));
  }
  const auto plan = std::make_shared<StepPlan>(graph, options);
  const RankOutcome result = run_step(*ranks[0], plan, 0, kNoStall);
  CHECK(result.outcome == ClaimOutcome::kDone && result.ran == options.order);
  close_rank(*ranks[0]);
}

TEST_CASE(attachments_are_moved_and_left_ones_come_back) {
  auto ranks = make_ranks(2);
  const auto plan = make_plan(2, 2);
  int things[2];
  for (auto& rank : ranks) rank->begin_step(plan, 0, kNoStall);
  for (int microbatch = 0; microbatch < 2; ++microbatch) {
    const ClaimResult claimed = ranks[0]->claim(0);
    auto* message = new OutboundMessage;
    message->attachment = &things[microbatch];
    ranks[0]->post_output(claimed.local, 1, message);
    CHECK(message->attachment == nullptr);
    ranks[0]->retire(claimed.local);
  }
  const auto inputs = ranks[1]->take_inputs(ranks[1]->claim(0).local);
  CHECK(inputs.size() == 1 && inputs[0]->attachment == &things[0]);
  RankRuntime::release(inputs[0]);
  ranks[1]->abort({StatusCode::kInterrupted, 1, "stop"});
  const auto left = ranks[1]->drain();
  CHECK(left.size() == 1 && left[0]->attachment == &things[1]);
  for (InboundMessage* message : left) RankRuntime::release(message);
  on_each(ranks, close_rank);
}

// Rank 0 is a whole step ahead; its messages wait until rank 1 comes.
TEST_CASE(early_messages_wait_for_their_step) {
  auto ranks = make_ranks(2);
  const auto plan = make_plan(2, 3, "bf", kUnlimited, true);
  CHECK(run_step(*ranks[0], plan, 0, kNoStall).outcome == ClaimOutcome::kDone);
  CHECK(run_step(*ranks[0], plan, 1, kNoStall).outcome == ClaimOutcome::kDone);
  CHECK(run_step(*ranks[1], plan, 0, kNoStall).outcome == ClaimOutcome::kDone);
  // Two ahead of rank 1, which is in step 0.
  CHECK(run_step(*ranks[0], plan, 2, kNoStall).outcome == ClaimOutcome::kAborted);
  CHECK(contains(ranks[1]->status().message, "of step 2 came in step 0"));
  CHECK(ranks[1]->status().code == StatusCode::kProtocol);
  on_each(ranks, close_rank);
}

TEST_CASE(abort_ends_every_wait_with_the_first_status) {
  auto ranks = make_ranks(3);
  const auto plan = make_plan(3, 4);
  std::atomic<int> waiting{0};
  std::thread thrower([&] {
    while (waiting.load() < 3) std::this_thread::yield();
    ranks[1]->abort({StatusCode::kStageFailed, 1, "first"});
    ranks[2]->abort({StatusCode::kStageFailed, 2, "second"});
  });
  on_each(ranks, [&](RankRuntime& rank) {
    ++waiting;
    if (rank.rank() == 2) {
      CHECK(!rank.recv_control(0, 20000).has_value());
    } else {
      CHECK(run_step(rank, plan, 0, kNoStall).outcome == ClaimOutcome::kAborted);
    }
    CHECK(!rank.wait_sends(1000));
    CHECK(rank.status().message == "first" && rank.status().origin_rank == 1);
    CHECK(rank.status().code == StatusCode::kStageFailed);
  });
  thrower.join();
  on_each(ranks, close_rank);
}

TEST_CASE(control_keeps_its_order) {
  auto ranks = make_ranks(2);
  for (int i = 0; i < 20; ++i) ranks[0]->send_control(1, {std::byte(i)});
  for (int i = 0; i < 20; ++i) CHECK((*ranks[1]->recv_control(0, 100))[0] == std::byte(i));
  CHECK(ranks[1]->views()[1].state.activity == Activity::kOutside);  // it waits for nothing
  CHECK(!ranks[1]->recv_control(0, 1).has_value() && ranks[1]->status().ok());
  CHECK_THROWS_WITH(ranks[0]->send_control(1, std::vector<std::byte>(kMaxMetadataBytes + 1)),
                    "1048577 bytes");
  on_each(ranks, close_rank);
}

// A rank that says its last word and ends at once must not take that word back.
TEST_CASE(what_was_said_before_an_abort_is_heard) {
  auto ranks = make_ranks(2);
  ranks[0]->send_control(1, {std::byte{7}});
  ranks[0]->abort({StatusCode::kClosed, 0, "gone"});
  while (ranks[1]->status().ok()) std::this_thread::yield();
  const auto body = ranks[1]->recv_control(0, 20000);
  CHECK(body.has_value() && (*body)[0] == std::byte{7});
  CHECK(!ranks[1]->recv_control(0, 20000).has_value());
  on_each(ranks, close_rank);
}

// Rank 1 leaves the step without the gradient of microbatch 1.
TEST_CASE(a_stall_names_who_waits_for_whom) {
  auto ranks = make_ranks(2, kQuick);
  const auto plan = make_plan(2, 2, "1f1b", 0);
  on_each(ranks, [&](RankRuntime& rank) {
    if (rank.rank() == 0) {
      CHECK(run_step(rank, plan, 0, 400).outcome == ClaimOutcome::kAborted);
      return;
    }
    // Everything but the last two tasks, 1F1 and 1B1; rank 0 still waits in the step.
    CHECK(run_step(rank, plan, 0, 400, {}, 2).ran.size() == 2);
    while (rank.status().ok()) sleep_ms(1);
  });
  const Status status = ranks[0]->status();
  CHECK(status.code == StatusCode::kStalled && ranks[1]->status().message == status.message);
  CHECK(contains(status.message, "nothing could run on any rank for "));
  CHECK(contains(status.message, "waits for 0B1, which lacks the message of stage 1 (rank 1)"));
  CHECK(contains(status.message, "Rank 1 is outside a step, after step 0"));
  CHECK(contains(status.message, "Look at rank 1 first"));
  CHECK(contains(status.message, "Rank 0: step 0: 0F0 ") && contains(status.message, ", 0F1 "));
  CHECK(contains(status.message, "Rank 1: step 0: 1F0 ") && contains(status.message, ", 1B0 "));
  const auto views = ranks[0]->views();
  CHECK(views.size() == 2 && views[0].is_own && views[0].decisions.size() == 3);
  CHECK(!views[1].is_own && views[1].has_spoken && views[1].decisions.size() == 2);
  on_each(ranks, close_rank);
}

TEST_CASE(a_long_task_is_busy_and_not_stalled) {
  auto ranks = make_ranks(3, kQuick);
  const auto plan = make_plan(3, 2);
  on_each(ranks, [&](RankRuntime& rank) {
    const RankOutcome result = run_step(rank, plan, 0, 150, [](const Task& task) {
      if (to_text(task) == "2F0") sleep_ms(700);
    });
    CHECK(result.outcome == ClaimOutcome::kDone);
  });
  CHECK(contains(ranks[0]->describe(), "Rank 2"));
  on_each(ranks, close_rank);
}

TEST_CASE(a_rank_that_never_enters_is_named) {
  auto ranks = make_ranks(2, kQuick);
  const auto plan = make_plan(2, 1);
  CHECK(run_step(*ranks[0], plan, 3, 300).outcome == ClaimOutcome::kAborted);
  CHECK(ranks[0]->status().code == StatusCode::kTimedOut);
  CHECK(contains(ranks[0]->status().message, "rank 1 did not enter step 3"));
  on_each(ranks, close_rank);
}

TEST_CASE(goodbye_is_fine_unless_someone_is_needed) {
  auto ranks = make_ranks(2, kQuick);
  const auto forward = make_plan(2, 3, "bf", kUnlimited, true);
  run_step(*ranks[0], forward, 0, kNoStall);
  close_rank(*ranks[0]);  // done with the step, and nothing more is needed of it
  CHECK(run_step(*ranks[1], forward, 0, kNoStall).outcome == ClaimOutcome::kDone);
  CHECK(ranks[1]->status().ok());
  CHECK(run_step(*ranks[1], forward, 1, kNoStall).outcome == ClaimOutcome::kAborted);
  CHECK(ranks[1]->status().code == StatusCode::kClosed);
  CHECK(contains(ranks[1]->status().message, "rank 0 has closed its pipeline, while rank 1 is in "
                                             "step 1 and still needs it"));
  close_rank(*ranks[1]);

  auto others = make_ranks(2, kQuick);
  close_rank(*others[0]);
  CHECK(!others[1]->recv_control(0, 20000).has_value());
  CHECK(contains(others[1]->status().message, "waits for its word on the coming step"));
  close_rank(*others[1]);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
