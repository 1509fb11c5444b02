// HintPolicy: what a hint's name stands for in a step: the rule, the order behind it, how much
// may be overtaken and what is waited for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arbiter/hint_order.hpp"
#include "arbiter/named_orders.hpp"
#include "runtime/stage_graph.hpp"

namespace rrfp {

// Slack of StepOptions: the hint's own. Unlimited for a hint the user names; "auto" sets bounds.
inline constexpr std::int32_t kAutoSlack = -2;

struct HintPolicy {
  HintRule rule = HintRule::kOrder;
  std::string order;             // the textbook order that ranks the tasks
  bool ranks_itself = false;     // its positions are those of its own unit-time execution; the
                                 // order only breaks ties inside a kind
  std::int32_t slack = -1;       // where the user leaves it to the hint
  double forward_patience = 0;   // see ArbiterOptions
  double weight_patience = 0;
  bool is_tight = false;         // "auto" with an order, below kTightLimit times its peak
};

// What a step asks for, as far as a hint may depend on it.
struct HintRequest {
  std::string hint;
  bool split_backward = false;
  std::int32_t limit_units = 0;  // the largest of all ranks
  const MicrobatchOrder& microbatch_order;
};

bool is_known_hint(const std::string& hint);
std::string known_hints();  // for people

// Why the graph or the kinds of the step do not fit the hint, for people; empty: they do.
std::string misfit(const StageGraph& graph, const std::string& hint, bool split_backward);

// Below this multiple of the order's own peak there is little room to leave the order: "auto"
// keeps closer to it, and the guard may return to it.
inline constexpr double kTightLimit = 1.25;

// The hint must fit.
HintPolicy policy_of(const StageGraph& graph, const HintRequest& request);

// By rank. `order` is one of gpipe, 1f1b, interleaved, zb-h1 and zbv.
std::vector<std::vector<Task>> textbook_orders(const StageGraph& graph, const std::string& order,
                                               bool split_backward,
                                               const MicrobatchOrder& microbatch_order);

// In units, the same for all ranks: what a step may hold where the user does not say. One stage
// per rank: a unit per rank, 1F1B's peak on its first. Several: the peak of the interleaved
// order, for stages placed in a V that of ZB-V.
std::int32_t default_limit_units(const StageGraph& graph, const MicrobatchOrder& microbatch_order);

}  // namespace rrfp
