// RankRuntimes of one process under load, for ThreadSanitizer: many short steps with early
// messages, over threads and over sockets, and aborts from any thread at any moment.
#include <atomic>
#include <random>

#include "check.hpp"
#include "comm/socket_transport.hpp"
#include "tiny_pipeline.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

constexpr std::int64_t kNoStall = 60000;
constexpr RuntimeOptions kOptions{.heartbeat_ms = 50, .peer_timeout_ms = 60000, .spin_us = 20,
                                  .least_announced_us = 1};

std::vector<std::unique_ptr<RankRuntime>> make_socket_ranks(std::int32_t num_ranks,
                                                            bool workers_move_messages) {
  std::vector<std::unique_ptr<SocketListener>> listeners;
  std::vector<std::string> addresses;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    listeners.push_back(std::make_unique<SocketListener>());
    addresses.push_back(listeners.back()->address());
  }
  std::vector<std::unique_ptr<RankRuntime>> ranks(num_ranks);
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      SocketSetup setup;
      setup.rank = rank;
      setup.addresses = addresses;
      setup.run = 77;
      Status status;
      auto transport = connect_sockets(*listeners[rank], setup, &status);
      if (transport == nullptr) {
        std::fprintf(stderr, "no connection: %s\n", status.message.c_str());
        std::abort();
      }
      RuntimeOptions options = kOptions;
      options.run = 77;
      options.worker_moves_messages = workers_move_messages;
      options.spin_yields = rank % 2 == 0;
      ranks[rank] = std::make_unique<RankRuntime>(std::move(transport), options);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

std::vector<std::shared_ptr<const StepPlan>> random_plans(std::int32_t num_ranks,
                                                          std::size_t how_many) {
  std::mt19937_64 random(seed() + static_cast<std::uint64_t>(num_ranks));
  const char* hints[] = {"auto", "bf", "1f1b", "gpipe", "fb", "b-priority", "f-priority"};
  const std::int32_t slacks[] = {0, 1, kUnlimited};
  std::vector<std::shared_ptr<const StepPlan>> plans;
  for (std::size_t i = 0; i < how_many; ++i) {
    plans.push_back(make_plan(num_ranks, static_cast<std::int32_t>(random() % 9 + 1),
                              hints[random() % 7], slacks[random() % 3], random() % 3 == 0));
  }
  return plans;
}

void spin(std::uint64_t turns) {
  for (std::uint64_t i = 0; i < turns; ++i) asm volatile("");
}

void run_steps(std::vector<std::unique_ptr<RankRuntime>>& ranks, std::size_t num_steps) {
  const auto plans = random_plans(static_cast<std::int32_t>(ranks.size()), num_steps);
  on_each(ranks, [&](RankRuntime& rank) {
    std::mt19937_64 random(seed() + 100 * static_cast<std::uint64_t>(rank.rank()));
    for (std::size_t step = 0; step < num_steps; ++step) {
      // As Python does: rank 0 hears all and answers all, so nobody is two steps ahead.
      if (rank.rank() == 0) {
        for (std::int32_t peer = 1; peer < rank.num_ranks(); ++peer) {
          CHECK(rank.recv_control(peer, 20000).has_value());
        }
        for (std::int32_t peer = 1; peer < rank.num_ranks(); ++peer) {
          rank.send_control(peer, {std::byte{1}});
        }
      } else {
        rank.send_control(0, {std::byte{2}});
        CHECK(rank.recv_control(0, 20000).has_value());
      }
      const RankOutcome result =
          run_step(rank, plans[step], static_cast<std::uint32_t>(step), kNoStall,
                   [&](const Task&) { spin(random() % 3000); });
      CHECK(result.outcome == ClaimOutcome::kDone);
      if (result.outcome != ClaimOutcome::kDone) {
        std::fprintf(stderr, "%s\n", rank.status().message.c_str());
        return;
      }
      CHECK(result.ran.size() ==
            static_cast<std::size_t>(plans[step]->table(rank.rank()).num_tasks()));
    }
    CHECK(rank.num_late() == 0 && rank.status().ok());
  });
  on_each(ranks, close_rank);
}

// Every rank runs steps until somebody, somewhere, aborts; then all have the same status.
void abort_somewhere(std::vector<std::unique_ptr<RankRuntime>> ranks, std::uint64_t round) {
  std::mt19937_64 random(seed() + round);
  const auto plan = make_plan(static_cast<std::int32_t>(ranks.size()), 6);
  const auto culprit = static_cast<std::int32_t>(random() % ranks.size());
  const std::size_t after = random() % 20;  // tasks
  const bool is_inside = random() % 2 == 0;
  std::atomic<std::size_t> num_run{0};
  const Status status{StatusCode::kStageFailed, culprit, "round " + std::to_string(round)};
  std::thread outsider([&] {
    while (!is_inside && num_run.load() < after) std::this_thread::yield();
    if (!is_inside) ranks[culprit]->abort(status);
  });
  on_each(ranks, [&](RankRuntime& rank) {
    ClaimOutcome outcome = ClaimOutcome::kDone;
    for (std::uint32_t step = 0; outcome == ClaimOutcome::kDone; ++step) {
      outcome = run_step(rank, plan, step, kNoStall, [&](const Task&) {
                  if (++num_run >= after && is_inside && rank.rank() == culprit) {
                    rank.abort(status);
                  }
                }).outcome;
    }
    CHECK(outcome == ClaimOutcome::kAborted);
    if (rank.status().message != status.message || rank.status().origin_rank != culprit) {
      fail(__FILE__, __LINE__, "rank " + std::to_string(rank.rank()) + " has another status: " +
                                   rank.status().message);
    }
    close_rank(rank);
  });
  outsider.join();
}

}  // namespace

TEST_CASE(many_steps_between_threads) {
  for (const std::int32_t num_ranks : {1, 2, 4}) {
    auto ranks = make_ranks(num_ranks, kOptions);
    run_steps(ranks, 200);
  }
}

TEST_CASE(many_steps_over_sockets) {
  for (const bool workers_move_messages : {false, true}) {
    auto ranks = make_socket_ranks(3, workers_move_messages);
    run_steps(ranks, 100);
  }
}

TEST_CASE(aborts_at_any_moment) {
  for (std::uint64_t round = 0; round < 40; ++round) {
    abort_somewhere(make_ranks(3, kOptions), round);
  }
  for (std::uint64_t round = 0; round < 20; ++round) {
    abort_somewhere(make_socket_ranks(3, round % 2 == 0), round);
  }
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
