#include "runtime/stage_graph.hpp"

#include <algorithm>
#include <string>

#include "base/check.hpp"

namespace rrfp {

namespace {

// A task waits for at most 64 inputs (one bit each); a backward also waits for its own forward.
constexpr std::size_t kMaxEdgesOfStage = 63;

std::string edge_text(std::pair<std::int32_t, std::int32_t> edge) {
  return "(" + std::to_string(edge.first) + ", " + std::to_string(edge.second) + ")";
}

}  // namespace

StageGraph::StageGraph(std::int32_t num_ranks, std::vector<std::int32_t> rank_of_stage,
                       std::vector<std::pair<std::int32_t, std::int32_t>> edges,
                       std::vector<std::int32_t> loss_stages)
    : rank_of_stage_(std::move(rank_of_stage)) {
  const auto stages = num_stages();
  RRFP_CHECK(num_ranks >= 1, "a pipeline needs at least 1 rank, got " + std::to_string(num_ranks));
  RRFP_CHECK(stages >= 1, "a pipeline needs at least 1 stage, got none");
  stages_of_rank_.resize(num_ranks);
  for (std::int32_t stage = 0; stage < stages; ++stage) {
    const std::int32_t rank = rank_of_stage_[stage];
    RRFP_CHECK(rank >= 0 && rank < num_ranks,
               "stage " + std::to_string(stage) + " is placed on rank " + std::to_string(rank) +
                   ", but the ranks are 0 to " + std::to_string(num_ranks - 1));
    stages_of_rank_[rank].push_back(stage);
  }
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    RRFP_CHECK(!stages_of_rank_[rank].empty(),
               "rank " + std::to_string(rank) + " owns no stage: " + std::to_string(stages) +
                   " stages are placed on " + std::to_string(num_ranks) +
                   " ranks; use fewer ranks or place a stage on each");
  }
  check_edges(edges);
  std::sort(edges.begin(), edges.end());
  sources_.resize(stages);
  consumers_.resize(stages);
  for (const auto& [source, target] : edges) {
    consumers_[source].push_back(target);
    sources_[target].push_back(source);
  }
  check_acyclic();
  is_chain_ = edges.size() + 1 == static_cast<std::size_t>(stages) &&
              std::all_of(edges.begin(), edges.end(),
                          [](const auto& edge) { return edge.second == edge.first + 1; });
  is_loss_.assign(stages, false);
  for (const std::int32_t stage : loss_stages) {
    RRFP_CHECK(stage >= 0 && stage < stages,
               "loss stage " + std::to_string(stage) + " does not exist: the stages are 0 to " +
                   std::to_string(stages - 1));
    is_loss_[stage] = true;
  }
  for (std::int32_t stage = 0; stage < stages; ++stage) {
    const std::size_t most = std::max(sources_[stage].size(), consumers_[stage].size());
    RRFP_CHECK(most <= kMaxEdgesOfStage, "stage " + std::to_string(stage) + " has " +
                                             std::to_string(most) +
                                             " edges on one side; the most is 63");
    if (!consumers_[stage].empty()) continue;
    if (loss_stages.empty()) is_loss_[stage] = true;
    RRFP_CHECK(is_loss_[stage], "no stage consumes the output of stage " + std::to_string(stage) +
                                    " and it has no loss: add an edge from it, or list it in "
                                    "loss_stages");
  }
}

void StageGraph::check_edges(
    const std::vector<std::pair<std::int32_t, std::int32_t>>& edges) const {
  const auto stages = num_stages();
  for (std::size_t i = 0; i < edges.size(); ++i) {
    const auto [source, target] = edges[i];
    RRFP_CHECK(source >= 0 && source < stages && target >= 0 && target < stages,
               "edge " + edge_text(edges[i]) + " names a stage that does not exist: the stages are "
                                               "0 to " + std::to_string(stages - 1));
    RRFP_CHECK(source != target, "edge " + edge_text(edges[i]) + " joins a stage to itself");
    const auto twin = std::find(edges.begin(), edges.begin() + i, edges[i]);
    RRFP_CHECK(twin == edges.begin() + i, "edge " + edge_text(edges[i]) + " is listed twice");
  }
}

// Takes away stages without producers until none is left; what stays lies on or behind a cycle.
void StageGraph::check_acyclic() const {
  std::vector<std::size_t> missing(num_stages());
  std::vector<std::int32_t> free;
  for (std::int32_t stage = 0; stage < num_stages(); ++stage) {
    missing[stage] = sources_[stage].size();
    if (missing[stage] == 0) free.push_back(stage);
  }
  for (std::size_t i = 0; i < free.size(); ++i) {
    for (const std::int32_t target : consumers_[free[i]]) {
      if (--missing[target] == 0) free.push_back(target);
    }
  }
  if (free.size() == missing.size()) return;
  // Walking back from any stage that is left stays among those left, and must meet itself.
  std::int32_t stage = 0;
  while (missing[stage] == 0) ++stage;
  std::vector<std::int32_t> walk;
  while (std::find(walk.begin(), walk.end(), stage) == walk.end()) {
    walk.push_back(stage);
    stage = *std::find_if(sources_[stage].begin(), sources_[stage].end(),
                          [&](std::int32_t source) { return missing[source] != 0; });
  }
  std::string text = std::to_string(stage);
  for (auto it = walk.rbegin(); it != walk.rend(); ++it) {
    text += " -> " + std::to_string(*it);
    if (*it == stage) break;
  }
  throw UserError("the stages wait for one another in a circle: " + text +
                  "; a stage graph must not have cycles");
}

std::int32_t StageGraph::rank_of(std::int32_t stage) const { return rank_of_stage_.at(stage); }

const std::vector<std::int32_t>& StageGraph::stages_of(std::int32_t rank) const {
  return stages_of_rank_.at(rank);
}

const std::vector<std::int32_t>& StageGraph::sources_of(std::int32_t stage) const {
  return sources_.at(stage);
}

const std::vector<std::int32_t>& StageGraph::consumers_of(std::int32_t stage) const {
  return consumers_.at(stage);
}

bool StageGraph::is_loss(std::int32_t stage) const { return is_loss_.at(stage); }

std::int32_t StageGraph::max_stages_per_rank() const {
  std::size_t most = 0;
  for (const auto& stages : stages_of_rank_) most = std::max(most, stages.size());
  return static_cast<std::int32_t>(most);
}

const std::vector<std::int32_t>& StageGraph::targets_of(const Task& task) const {
  switch (task.kind) {
    case TaskKind::kForward: return consumers_of(task.stage);
    case TaskKind::kBackward:
    case TaskKind::kInputGrad: return sources_of(task.stage);
    case TaskKind::kWeightGrad: break;
  }
  return nothing_;
}

}  // namespace rrfp
