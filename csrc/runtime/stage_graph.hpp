// StageGraph: the stages of a model, the edges between them and the rank that owns each.
// Immutable and shared by all ranks of one process.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/task.hpp"

namespace rrfp {

class StageGraph {
 public:
  // Refused with UserError: a stage without a rank, a rank without a stage, an edge to a stage
  // that does not exist, to itself or listed twice, a cycle (its stages are named), a stage
  // that nobody consumes and that has no loss. `loss_stages` empty: the stages without
  // consumers.
  StageGraph(std::int32_t num_ranks, std::vector<std::int32_t> rank_of_stage,
             std::vector<std::pair<std::int32_t, std::int32_t>> edges,
             std::vector<std::int32_t> loss_stages);

  std::int32_t num_ranks() const { return static_cast<std::int32_t>(stages_of_rank_.size()); }
  std::int32_t num_stages() const { return static_cast<std::int32_t>(rank_of_stage_.size()); }
  std::int32_t rank_of(std::int32_t stage) const;
  const std::vector<std::int32_t>& stages_of(std::int32_t rank) const;  // its chunks, ascending
  const std::vector<std::int32_t>& sources_of(std::int32_t stage) const;    // producers, ascending
  const std::vector<std::int32_t>& consumers_of(std::int32_t stage) const;  // ascending
  bool is_loss(std::int32_t stage) const;
  bool is_chain() const { return is_chain_; }           // edges s -> s+1 and no other
  std::int32_t max_stages_per_rank() const;

  // The stages that wait for what `task` computes: consumers of an F, producers behind a B or
  // I, none of a W.
  const std::vector<std::int32_t>& targets_of(const Task& task) const;

 private:
  void check_edges(const std::vector<std::pair<std::int32_t, std::int32_t>>& edges) const;
  void check_acyclic() const;

  std::vector<std::int32_t> rank_of_stage_;
  std::vector<std::vector<std::int32_t>> stages_of_rank_;
  std::vector<std::vector<std::int32_t>> sources_;
  std::vector<std::vector<std::int32_t>> consumers_;
  std::vector<bool> is_loss_;
  std::vector<std::int32_t> nothing_;  // targets_of() of a weight gradient
  bool is_chain_ = false;
};

}  // namespace rrfp
