// OwnTasks under more threads than cores: random graphs, each task once, after all that it waits
// for, whose plain writes it must see (ThreadSanitizer: T1); and an end() in the middle.
#include <atomic>
#include <random>
#include <thread>

#include "check.hpp"
#include "runtime/own_tasks.hpp"

namespace rrfp::test {
namespace {

constexpr int kNumThreads = 4;

struct Graph {
  std::vector<std::vector<std::int32_t>> after;
  std::vector<std::int32_t> order;
};

Graph random_graph(std::mt19937_64& random, bool order_is_topological) {
  Graph graph;
  const auto num_tasks = 1 + static_cast<std::int32_t>(random() % 60);
  for (std::int32_t task = 0; task < num_tasks; ++task) {
    graph.order.push_back(task);
    auto& after = graph.after.emplace_back();
    for (std::int32_t before = 0; before < task; ++before) {
      if (random() % 8 == 0) after.push_back(before);
    }
  }
  if (!order_is_topological) std::shuffle(graph.order.begin(), graph.order.end(), random);
  return graph;
}

// Each thread runs tasks; returns how many have run.
std::int32_t run(const Graph& graph, std::int32_t slack, std::int32_t end_after) {
  OwnTasks tasks(graph.after, graph.order, slack);
  std::vector<int> times_run(graph.after.size(), 0);  // plain: T1 and the lock order them
  std::atomic<std::int32_t> num_run{0};
  for (const std::int32_t task : tasks.first_ready()) tasks.arrive(task);
  std::vector<std::thread> threads;
  for (int t = 0; t < kNumThreads; ++t) {
    threads.emplace_back([&] {
      for (;;) {
        const std::int32_t task = tasks.claim(20000);
        if (task < 0) {
          CHECK(task == OwnTasks::kDone || task == OwnTasks::kEnded);
          return;
        }
        for (const std::int32_t before : graph.after[task]) CHECK(times_run[before] == 1);
        ++times_run[task];
        if (num_run.fetch_add(1) + 1 == end_after) tasks.end();
        for (const std::int32_t next : tasks.retire(task)) tasks.arrive(next);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const int times : times_run) CHECK(times <= 1);
  return num_run.load();
}

TEST_CASE(every_task_runs_once_after_what_it_waits_for) {
  for (std::uint64_t i = 0; i < 300; ++i) {
    std::mt19937_64 random(seed() + i);
    const std::int32_t slack = i % 3 == 0 ? kUnlimited : static_cast<std::int32_t>(i % 3 - 1) * 3;
    const Graph graph = random_graph(random, slack != kUnlimited);
    CHECK(run(graph, slack, -1) == static_cast<std::int32_t>(graph.after.size()));
  }
}

TEST_CASE(end_ends_every_wait) {
  for (std::uint64_t i = 0; i < 100; ++i) {
    std::mt19937_64 random(seed() + i);
    const Graph graph = random_graph(random, false);
    const auto num_tasks = static_cast<std::int32_t>(graph.after.size());
    const std::int32_t end_after = 1 + static_cast<std::int32_t>(random() % num_tasks);
    CHECK(run(graph, kUnlimited, end_after) >= end_after);  // others may be inside one
  }
}

TEST_CASE(circles_are_found) {
  CHECK(circle_of_tasks({{}, {0}, {0, 1}}).empty());
  CHECK(circle_of_tasks({{2}, {0}, {1}, {0}}) == (std::vector<std::int32_t>{0, 2, 1}));
  CHECK(circle_of_tasks({{}, {0, 2}, {3}, {1}}).size() == 3);
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
