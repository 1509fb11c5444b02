// StageGraph and StepPlan: what every rank of a step agrees on, validated before a task runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "arbiter/hint_order.hpp"
#include "base/task.hpp"

namespace rrfp {

// The stages, their edges and their ranks. A DAG; acyclic and connected to a rank, or UserError.
class StageGraph {
 public:
  StageGraph(std::int32_t num_ranks, std::vector<std::int32_t> rank_of_stage,
             std::vector<std::pair<std::int32_t, std::int32_t>> edges,
             std::vector<std::int32_t> loss_stages);

  std::int32_t num_ranks() const;
  std::int32_t num_stages() const;
  std::int32_t rank_of(std::int32_t stage) const;
  const std::vector<std::int32_t>& stages_of(std::int32_t rank) const;  // its chunks, ascending
  const std::vector<std::int32_t>& sources_of(std::int32_t stage) const;    // producers, ascending
  const std::vector<std::int32_t>& consumers_of(std::int32_t stage) const;  // ascending
  bool is_loss(std::int32_t stage) const;
  bool is_chain() const;
};

struct StepOptions {
  std::int32_t num_microbatches = 0;
  std::vector<std::int32_t> microbatch_order;  // empty: as given
  // A name (gpipe, 1f1b, bf, fb, b-priority, f-priority, auto), or "order" with `order` below.
  std::string hint = "auto";
  std::vector<Task> order;           // all tasks of all ranks; each rank takes its own, in order
  std::int32_t slack = kUnlimited;
  std::vector<std::int32_t> limits;  // units per rank; empty: the default of the hint and slack
  bool forward_only = false;
};

// Immutable; shared by the engines of all ranks of one process.
class StepPlan {
 public:
  // UserError, naming the values and the remedy, for: an order that omits, repeats or invents a
  // task; a limit below the least; a fixed order (slack 0) under which the ranks would wait for
  // one another for ever; a hint this version does not know.
  StepPlan(std::shared_ptr<const StageGraph> graph, StepOptions options);

  const StageGraph& graph() const;
  std::int32_t num_microbatches() const;
  bool forward_only() const;
  const std::vector<std::int32_t>& microbatch_order() const;
  const TaskTable& table(std::int32_t rank) const;
  const HintOrder& hint_order(std::int32_t rank) const;
  ArbiterOptions arbiter_options(std::int32_t rank) const;
  std::int32_t limit_units(std::int32_t rank) const;
};

}  // namespace rrfp
