#include "runtime/fixed_order.hpp"

#include <algorithm>
#include <cstddef>
#include <unordered_set>

namespace rrfp {

namespace {

std::uint64_t key_of(const Task& task) {
  return (static_cast<std::uint64_t>(task.stage) * kNumTaskKinds +
          static_cast<std::uint64_t>(task.kind)) << 32 |
         static_cast<std::uint32_t>(task.microbatch);
}

// The ranks' orders, each run up to the first task that lacks an input.
struct Progress {
  std::vector<std::size_t> next;            // by rank
  std::unordered_set<std::uint64_t> done;

  // The first input of the task that has not run, or null.
  const Task* lacks(const std::vector<Task>& inputs) const {
    const auto it = std::find_if(inputs.begin(), inputs.end(), [&](const Task& input) {
      return !done.contains(key_of(input));
    });
    return it == inputs.end() ? nullptr : &*it;
  }
};

Progress run(const StageGraph& graph, const std::vector<std::vector<Task>>& orders) {
  Progress progress;
  progress.next.resize(orders.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < orders.size(); ++rank) {
      auto& next = progress.next[rank];
      for (; next < orders[rank].size(); ++next, moved = true) {
        const Task& task = orders[rank][next];
        if (progress.lacks(inputs_of(graph, task))) break;
        progress.done.insert(key_of(task));
      }
    }
  }
  return progress;
}

}  // namespace

std::vector<Task> inputs_of(const StageGraph& graph, const Task& task) {
  std::vector<Task> inputs;
  const auto add = [&](std::int32_t stage, TaskKind kind) {
    inputs.push_back({stage, kind, task.microbatch});
  };
  switch (task.kind) {
    case TaskKind::kForward:
      for (const std::int32_t source : graph.sources_of(task.stage)) add(source, task.kind);
      break;
    case TaskKind::kBackward:
    case TaskKind::kInputGrad:
      add(task.stage, TaskKind::kForward);
      for (const std::int32_t consumer : graph.consumers_of(task.stage)) add(consumer, task.kind);
      break;
    case TaskKind::kWeightGrad:
      add(task.stage, TaskKind::kInputGrad);
      break;
  }
  return inputs;
}

std::string circle_of_waits(const StageGraph& graph,
                            const std::vector<std::vector<Task>>& orders) {
  const Progress progress = run(graph, orders);
  std::int32_t rank = 0;
  while (rank < graph.num_ranks() && progress.next[rank] == orders[rank].size()) ++rank;
  if (rank == graph.num_ranks()) return "";
  // Every stuck rank waits for a task that has not run, so for another stuck rank (or itself):
  // the walk meets a rank again, and from there on it is the circle.
  std::vector<std::int32_t> walk;
  std::vector<std::string> waits;
  while (std::find(walk.begin(), walk.end(), rank) == walk.end()) {
    const Task& head = orders[rank][progress.next[rank]];
    const std::vector<Task> inputs = inputs_of(graph, head);
    const Task& lacking = *progress.lacks(inputs);
    walk.push_back(rank);
    rank = graph.rank_of(lacking.stage);
    const Task& barrier = orders[rank][progress.next[rank]];
    waits.push_back(to_text(head) + " waits for " + to_text(lacking) +
                    (barrier == lacking ? "" : ", which rank " + std::to_string(rank) +
                                                   " runs only after " + to_text(barrier)));
  }
  std::string text;
  for (auto at = std::find(walk.begin(), walk.end(), rank); at != walk.end(); ++at) {
    if (!text.empty()) text += "; ";
    text += waits[at - walk.begin()];
  }
  return text;
}

}  // namespace rrfp
