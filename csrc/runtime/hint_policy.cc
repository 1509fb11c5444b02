#include "runtime/hint_policy.hpp"

#include <algorithm>
#include <iterator>

namespace rrfp {

namespace {

struct NamedHint {
  const char* name;
  HintRule rule;
  bool is_order;     // a textbook order, else a rule
  bool needs_split;  // has weight gradients of its own
};

constexpr NamedHint kHints[] = {
    {"gpipe", HintRule::kOrder, true, false},
    {"1f1b", HintRule::kOrder, true, false},
    {"interleaved", HintRule::kOrder, true, false},
    {"zb-h1", HintRule::kOrder, true, true},
    {"zbv", HintRule::kOrder, true, true},
    {"bf", HintRule::kBackwardForward, false, false},
    {"bfw", HintRule::kBackwardForward, false, true},
    {"fb", HintRule::kForwardBackward, false, false},
    {"b-priority", HintRule::kBackwardPriority, false, false},
    {"f-priority", HintRule::kForwardPriority, false, false},
};
constexpr const char* kAuto = "auto";

const NamedHint* find_hint(const std::string& name) {
  const auto it = std::find_if(std::begin(kHints), std::end(kHints),
                               [&](const NamedHint& hint) { return name == hint.name; });
  return it == std::end(kHints) ? nullptr : it;
}

bool has_one_stage_per_rank(const StageGraph& graph) { return graph.max_stages_per_rank() == 1; }

// Stage s on rank s mod P, as many stages on each.
bool is_loop(const StageGraph& graph) {
  if (!graph.is_chain() || graph.num_stages() % graph.num_ranks() != 0) return false;
  for (std::int32_t stage = 0; stage < graph.num_stages(); ++stage) {
    if (graph.rank_of(stage) != stage % graph.num_ranks()) return false;
  }
  return true;
}

// Stages s and 2P-1-s on rank s.
bool is_v(const StageGraph& graph) {
  const std::int32_t last = 2 * graph.num_ranks() - 1;
  if (!graph.is_chain() || graph.num_stages() != last + 1) return false;
  for (std::int32_t stage = 0; stage <= last; ++stage) {
    if (graph.rank_of(stage) != std::min(stage, last - stage)) return false;
  }
  return true;
}

// The order that "auto" ranks tasks by; empty: there is none for this graph.
std::string order_of_auto(const StageGraph& graph, bool split_backward) {
  if (graph.is_chain() && has_one_stage_per_rank(graph)) return split_backward ? "zb-h1" : "1f1b";
  if (is_v(graph)) return "zbv";
  return is_loop(graph) ? "interleaved" : "";
}

HintPolicy policy_of_auto(const StageGraph& graph, const HintRequest& request) {
  const bool split = request.split_backward;
  HintPolicy policy;
  policy.order = order_of_auto(graph, split);
  if (policy.order.empty()) {
    return {.rule = HintRule::kBackwardForward, .order = "gpipe", .ranks_itself = true};
  }
  std::int32_t peak = 0;
  for (const auto& order : textbook_orders(graph, policy.order, split, request.microbatch_order)) {
    peak = std::max(peak, peak_units(order));
  }
  const bool is_tight = request.limit_units < kTightLimit * peak;
  policy.is_tight = is_tight;
  const bool has_chunks = !has_one_stage_per_rank(graph);
  if (split) {
    policy.rule = is_tight && !has_chunks ? HintRule::kOrder : HintRule::kOrderThenWeight;
    policy.weight_patience = is_tight ? 0.9 : has_chunks ? 0.5 : 0.7;
    policy.forward_patience = !is_tight && has_chunks ? 0.4 : 0.6;
  } else if (has_chunks) {
    policy.rule = is_tight ? HintRule::kOrder : HintRule::kRoundsByPosition;
    policy.forward_patience = 0.4;
  } else {
    policy.rule = HintRule::kBackwardForward;
    policy.ranks_itself = true;
    policy.forward_patience = 0.4;
  }
  if (is_tight && has_chunks) policy.slack = 2 * graph.num_ranks();
  return policy;
}

// A rank's stages, each behind those it waits for; the lower first where both are possible. A
// fixed order that had them by number alone would never end where an edge leads to a lower one.
std::vector<std::int32_t> upstream_first(const StageGraph& graph, std::int32_t rank) {
  std::vector<bool> is_placed(graph.num_stages(), false);
  std::vector<std::int32_t> stages;
  for (std::int32_t num_placed = 0; num_placed < graph.num_stages(); ++num_placed) {
    std::int32_t stage = 0;
    const auto waits = [&](std::int32_t s) {
      const auto& sources = graph.sources_of(s);
      return std::any_of(sources.begin(), sources.end(),
                         [&](std::int32_t source) { return !is_placed[source]; });
    };
    while (is_placed[stage] || waits(stage)) ++stage;
    is_placed[stage] = true;
    if (graph.rank_of(stage) == rank) stages.push_back(stage);
  }
  return stages;
}

std::vector<Task> textbook_order(const StageGraph& graph, const std::string& order,
                                 std::int32_t rank, const MicrobatchOrder& microbatch_order) {
  const auto& stages = graph.stages_of(rank);
  const std::int32_t num_ranks = graph.num_ranks();
  if (order == "1f1b") return one_f_one_b_order(stages.front(), num_ranks, microbatch_order);
  if (order == "zb-h1") return zb_h1_order(stages.front(), num_ranks, microbatch_order);
  if (order == "zbv") return zbv_order(rank, num_ranks, microbatch_order);
  if (order == "interleaved") {
    return interleaved_order(rank, num_ranks, graph.max_stages_per_rank(), microbatch_order);
  }
  return gpipe_order(upstream_first(graph, rank), microbatch_order);
}

}  // namespace

bool is_known_hint(const std::string& hint) { return hint == kAuto || find_hint(hint) != nullptr; }

std::string known_hints() {
  std::string names;
  for (const NamedHint& hint : kHints) names += std::string(hint.name) + ", ";
  return names + "auto";
}

std::string misfit(const StageGraph& graph, const std::string& hint, bool split_backward) {
  const NamedHint* named = find_hint(hint);
  if (named != nullptr && named->needs_split && !split_backward) {
    return "needs weight gradients as tasks of their own; use split_backward=True";
  }
  const bool is_one_per_rank = graph.is_chain() && has_one_stage_per_rank(graph);
  if ((hint == "1f1b" || hint == "zb-h1") && !is_one_per_rank) {
    return "needs a chain with one stage per rank; use " +
           std::string(hint == "1f1b" ? "interleaved" : "zbv") +
           " for several stages per rank, bf for other graphs";
  }
  if (hint == "interleaved" && !is_loop(graph)) {
    return "needs a chain with stage s on rank s mod the number of ranks (placement loop); use "
           "bf or auto for others";
  }
  if (hint == "zbv" && !is_v(graph)) {
    return "needs a chain of two stages per rank in a V (placement v: stage s and its mirror "
           "image on rank s); use interleaved or auto for others";
  }
  return "";
}

HintPolicy policy_of(const StageGraph& graph, const HintRequest& request) {
  if (request.hint == kAuto) return policy_of_auto(graph, request);
  const NamedHint& named = *find_hint(request.hint);
  return {.rule = named.rule,
          .order = named.is_order ? named.name : "gpipe",
          .ranks_itself = !named.is_order};
}

std::vector<std::vector<Task>> textbook_orders(const StageGraph& graph, const std::string& order,
                                               bool split_backward,
                                               const MicrobatchOrder& microbatch_order) {
  const bool has_weight = order == "zb-h1" || order == "zbv";
  std::vector<std::vector<Task>> orders;
  for (std::int32_t rank = 0; rank < graph.num_ranks(); ++rank) {
    orders.push_back(textbook_order(graph, order, rank, microbatch_order));
    if (split_backward && !has_weight) orders.back() = split_order(orders.back());
    if (!split_backward && has_weight) orders.back() = merged_order(orders.back());
  }
  return orders;
}

std::int32_t default_limit_units(const StageGraph& graph, const MicrobatchOrder& microbatch_order) {
  const std::int32_t num_chunks = graph.max_stages_per_rank();
  if (num_chunks == 1) return graph.num_ranks();
  std::int32_t peak = 0;
  if (is_v(graph) && !is_loop(graph)) {
    for (const auto& order : textbook_orders(graph, "zbv", true, microbatch_order)) {
      peak = std::max(peak, peak_units(order));
    }
  } else {
    peak = interleaved_peak_units(graph.num_ranks(), num_chunks,
                                  static_cast<std::int32_t>(microbatch_order.size()));
  }
  return std::max(peak, num_chunks);
}

}  // namespace rrfp
