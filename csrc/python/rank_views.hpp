// What is known of a rank, as plain Python values: what Pipeline.dump() and errors report.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "runtime/peer_watch.hpp"

namespace rrfp::python {

// {rank, heard_seconds_ago (None: this process's own), activity, state, step, task, for_seconds,
// tasks_done, blocked_by, lacks_stage, lacks_rank, decisions, chosen}; a decision is {step, task,
// seconds_ago, num_passed, passed, because}. None where there is nothing to say.
pybind11::dict view_dict(const RankView& view, std::int64_t now_ns);

}  // namespace rrfp::python
