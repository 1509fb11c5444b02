// Two and three pipelines of threads whose ranks agree with one another through common memory:
// every member runs one order, with a rendezvous inside every task that only ends if the members
// are in the same one; and what happens when a member fails, stays away or leaves.
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <map>
#include <mutex>
#include <random>

#include "tiny_pipeline.hpp"

namespace rrfp::test {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr int kNumSteps = 6;
#else
constexpr int kNumSteps = 40;
#endif
constexpr std::uint64_t kNonce = 99;

struct Fleet {
  Fleet(std::int32_t num_members_, std::int32_t num_ranks_, RuntimeOptions options = {})
      : num_members(num_members_), num_ranks(num_ranks_), ranks(num_members_) {
    std::vector<std::vector<std::unique_ptr<AgreementSegment>>> segments(num_members);
    std::vector<std::string> names;
    for (std::int32_t m = 0; m < num_members; ++m) names.push_back("member " + std::to_string(m));
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
      segments[0].push_back(AgreementSegment::create(num_members, kNonce));
      for (std::int32_t m = 1; m < num_members; ++m) {
        segments[m].push_back(segments[0][rank]->share());
      }
      for (std::int32_t m = 0; m < num_members; ++m) {
        segments[m][rank]->join(m, names, std::vector<std::int32_t>(num_members, getpid()));
      }
    }
    for (std::int32_t m = 0; m < num_members; ++m) {
      options.run = m + 1;
      auto transports = make_local_transports(num_ranks);
      for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
        ranks[m].push_back(std::make_unique<RankRuntime>(std::move(transports[rank]), options,
                                                         std::move(segments[m][rank])));
      }
    }
  }

  void on_each(const std::function<void(std::int32_t member, RankRuntime&)>& body) {
    std::vector<std::thread> threads;
    for (std::int32_t m = 0; m < num_members; ++m) {
      for (auto& rank : ranks[m]) threads.emplace_back([&body, m, &rank] { body(m, *rank); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  ~Fleet() {
    on_each([](std::int32_t, RankRuntime& rank) { close_rank(rank); });
  }

  std::int32_t num_members, num_ranks;
  std::vector<std::vector<std::unique_ptr<RankRuntime>>> ranks;  // by member
};

TEST_CASE(members_meet_inside_every_task) {
  for (const std::int32_t num_members : {2, 3}) {
    constexpr std::int32_t kNumRanks = 2;
    Fleet fleet(num_members, kNumRanks);
    const auto plan = make_plan(kNumRanks, 6);
    std::vector<std::unique_ptr<std::barrier<>>> meet;
    std::vector<std::vector<Task>> inside(kNumRanks);
    std::mutex mutex;
    for (std::int32_t r = 0; r < kNumRanks; ++r) {
      meet.push_back(std::make_unique<std::barrier<>>(num_members));
    }
    fleet.on_each([&](std::int32_t m, RankRuntime& rank) {
      std::mt19937_64 random(seed() + m * 10 + rank.rank());
      for (int step = 0; step < kNumSteps; ++step) {
        const RankOutcome outcome = run_step(rank, plan, step, 60000, [&](const Task& task) {
          const auto late_us = static_cast<std::int64_t>(random() % (m == 1 ? 300 : 100));
          std::this_thread::sleep_for(std::chrono::microseconds(late_us));
          {
            std::lock_guard lock(mutex);
            inside[rank.rank()].push_back(task);
          }
          meet[rank.rank()]->arrive_and_wait();
          {
            std::lock_guard lock(mutex);
            for (const Task& other : inside[rank.rank()]) CHECK(other == task);
          }
          meet[rank.rank()]->arrive_and_wait();
          std::lock_guard lock(mutex);
          inside[rank.rank()].clear();
        });
        CHECK(outcome.outcome == ClaimOutcome::kDone);
        CHECK(outcome.ran.size() == 12);
        const std::uint64_t digest = rank.agreement_digest();
        std::vector<std::byte> card(sizeof digest);
        std::memcpy(card.data(), &digest, sizeof digest);
        const auto cards = rank.exchange_cards(card, 60000);
        CHECK(cards.size() == static_cast<std::size_t>(num_members));
        for (const auto& other : cards) CHECK(other == card);
      }
    });
  }
}

// A failure in one pipeline ends the other, on every rank, with the words of the first.
TEST_CASE(a_failing_member_ends_every_pipeline) {
  Fleet fleet(2, 2);
  const auto plan = make_plan(2, 8);
  fleet.on_each([&](std::int32_t m, RankRuntime& rank) {
    run_step(rank, plan, 0, 60000, [&](const Task& task) {
      if (m == 1 && task == Task{1, TaskKind::kForward, 3}) {
        rank.abort({StatusCode::kStageFailed, 1, "1F3\nValueError: no\ntrace"});
      }
    });
    CHECK(rank.status().code == StatusCode::kStageFailed);
    CHECK(rank.status().message.find("1F3\nValueError: no\ntrace") == 0);
  });
}

TEST_CASE(a_stall_names_the_member_that_has_not_arrived) {
  RuntimeOptions options;
  options.heartbeat_ms = 20;
  Fleet fleet(2, 2, options);
  const auto plan = make_plan(2, 4);
  fleet.on_each([&](std::int32_t m, RankRuntime& rank) {
    // Rank 1 of pipeline 1 stays away: nothing can run on any rank 1.
    if (m == 1 && rank.rank() == 1) return;
    run_step(rank, plan, 0, 400);
    CHECK(!rank.status().ok());
  });
  const Status status = fleet.ranks[0][1]->status();
  CHECK(status.code == StatusCode::kStalled || status.code == StatusCode::kTimedOut);
  // Or pipeline 1 was first: what its rank 0 says ends every pipeline.
  const bool is_named =
      status.message.find("has not arrived at member 1 of its agreement group") !=
          std::string::npos ||
      status.message.find("rank 1 did not enter step 0") != std::string::npos;
  if (!is_named) fail(__FILE__, __LINE__, "the stall names another cause: " + status.message);
}

TEST_CASE(a_member_that_closes_is_named) {
  Fleet fleet(2, 2);
  const auto plan = make_plan(2, 4);
  fleet.on_each([&](std::int32_t m, RankRuntime& rank) {
    CHECK(run_step(rank, plan, 0, 60000).outcome == ClaimOutcome::kDone);
    if (m == 1) return close_rank(rank);
    run_step(rank, plan, 1, 60000);
    CHECK(rank.status().code == StatusCode::kClosed);
  });
  CHECK(fleet.ranks[0][0]->status().message.find("closed its pipeline") != std::string::npos);
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
