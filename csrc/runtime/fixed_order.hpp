// What a fixed order (slack 0) does before any task runs: does it end, or would the ranks wait
// for one another?
#pragma once

#include <string>
#include <vector>

#include "base/task.hpp"
#include "runtime/stage_graph.hpp"

namespace rrfp {

// The tasks whose results `task` needs, on whatever rank.
std::vector<Task> inputs_of(const StageGraph& graph, const Task& task);

// Runs the orders (one per rank, each of them complete) as they stand. Empty: they end.
// Otherwise the circle in which the ranks wait, task by task, for people.
std::string circle_of_waits(const StageGraph& graph, const std::vector<std::vector<Task>>& orders);

}  // namespace rrfp
