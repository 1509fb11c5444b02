#include "runtime/step_plan.hpp"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "base/check.hpp"
#include "runtime/fixed_order.hpp"
#include "runtime/virtual_run.hpp"

namespace rrfp {

namespace {

constexpr const char* kUsersOrder = "order";

void check_permutation(const std::vector<std::int32_t>& order, std::int32_t num_microbatches) {
  RRFP_CHECK(static_cast<std::int32_t>(order.size()) == num_microbatches,
             "the microbatch order has " + std::to_string(order.size()) + " entries for " +
                 std::to_string(num_microbatches) + " microbatches; it must list each once");
  std::vector<std::int32_t> place(num_microbatches, -1);
  for (std::int32_t at = 0; at < num_microbatches; ++at) {
    const std::int32_t microbatch = order[at];
    const std::string entry = "the microbatch order lists microbatch " + std::to_string(microbatch);
    RRFP_CHECK(microbatch >= 0 && microbatch < num_microbatches,
               entry + " at place " + std::to_string(at) + ", but the microbatches are 0 to " +
                   std::to_string(num_microbatches - 1));
    RRFP_CHECK(place[microbatch] < 0, entry + " twice, at places " +
                                          std::to_string(place[microbatch]) + " and " +
                                          std::to_string(at));
    place[microbatch] = at;
  }
}

// Whether `stage` has its input, over whatever other stages, from another stage of the rank.
bool waits_for_rank(const StageGraph& graph, std::int32_t stage, std::int32_t rank) {
  std::vector<bool> is_seen(graph.num_stages(), false);
  std::vector<std::int32_t> open{stage};
  while (!open.empty()) {
    const std::int32_t next = open.back();
    open.pop_back();
    for (const std::int32_t source : graph.sources_of(next)) {
      if (graph.rank_of(source) == rank) return true;
      if (!is_seen[source]) open.push_back(source);
      is_seen[source] = true;
    }
  }
  return false;
}

// The microbatches in the order in which `order` runs the forwards of `stage`.
std::vector<std::int32_t> forwards_of(const std::vector<Task>& order, std::int32_t stage) {
  std::vector<std::int32_t> microbatches;
  for (const Task& task : order) {
    if (task.kind == TaskKind::kForward && task.stage == stage) {
      microbatches.push_back(task.microbatch);
    }
  }
  return microbatches;
}

}  // namespace

StepPlan::StepPlan(std::shared_ptr<const StageGraph> graph, StepOptions options)
    : graph_(std::move(graph)), options_(std::move(options)) {
  check_options();
  make_tables();
  if (options_.hint == kUsersOrder) {
    plan_users_order();
  } else {
    plan_named_hint();
  }
  set_limits();
}

StepPlan::StepPlan(std::shared_ptr<const StageGraph> graph, StepOptions options, HintRule rule,
                   const Orders& orders)
    : graph_(std::move(graph)), options_(std::move(options)) {
  options_.slack = kUnlimited;
  make_tables();
  set_orders(rule, orders);
  set_limits();
}

void StepPlan::plan_users_order() {
  if (options_.slack == kAutoSlack) options_.slack = kUnlimited;
  const Orders orders = users_order();
  set_orders(HintRule::kOrder, orders);
  options_.microbatch_order = forwards_of(orders[graph_->rank_of(0)], 0);
  if (options_.slack != kUnlimited) check_users_order(orders);
  if (options_.slack == 0 && options_.weight_in_order) check_weight_order(orders);
}

void StepPlan::plan_named_hint() {
  const HintPolicy policy =
      policy_of(*graph_, {.hint = options_.hint,
                          .split_backward = options_.split_backward,
                          .limit_units = units_for_policy(),
                          .microbatch_order = options_.microbatch_order});
  if (options_.slack == kAutoSlack) {
    options_.slack = policy.slack;
    // An order as it stands cannot keep a limit in bytes.
    if (policy.is_tight && !options_.forward_only && !counts_bytes()) {
      guarded_order_ = policy.order;
    }
  }
  Orders orders = textbook_orders(*graph_, policy.order, options_.split_backward,
                                  options_.microbatch_order);
  if (options_.forward_only) {
    for (auto& order : orders) {
      std::erase_if(order, [](const Task& task) { return task.kind != TaskKind::kForward; });
    }
  } else if (policy.ranks_itself) {
    orders = positions_of_rule(policy.rule, orders);
  }
  set_orders(policy.rule, orders);
  if (options_.waiting && options_.slack != 0 && graph_->is_chain() && !options_.forward_only) {
    forward_patience_ = policy.forward_patience;
    weight_patience_ = policy.weight_patience;
  }
}

void StepPlan::check_options() {
  const auto& hint = options_.hint;
  RRFP_CHECK(hint == kUsersOrder || is_known_hint(hint),
             "hint \"" + hint + "\" is not known; the hints are " + known_hints() +
                 ", or an order of your own");
  RRFP_CHECK(options_.num_microbatches >= 1, "a step needs at least 1 microbatch, got " +
                                                 std::to_string(options_.num_microbatches));
  RRFP_CHECK(options_.slack >= kAutoSlack,
             "slack must be 0 or more positions, unlimited or left to the hint; got " +
                 std::to_string(options_.slack));
  const std::string why = misfit(*graph_, hint, options_.split_backward || options_.forward_only);
  RRFP_CHECK(why.empty(), "hint \"" + hint + "\" " + why);
  check_limits();
  check_bytes();
  std::vector<std::int32_t> given(options_.num_microbatches);
  std::iota(given.begin(), given.end(), 0);
  if (options_.microbatch_order.empty()) options_.microbatch_order = given;
  check_permutation(options_.microbatch_order, options_.num_microbatches);
  RRFP_CHECK(hint != kUsersOrder || options_.microbatch_order == given,
             "an order of your own names the microbatches as you give them; it cannot be "
             "combined with another microbatch order");
  RRFP_CHECK(hint == kUsersOrder || options_.order.empty(),
             "hint \"" + hint + "\" came together with an order of tasks; give one of them");
}

void StepPlan::check_limits() const {
  RRFP_CHECK(options_.limits.empty() ||
                 static_cast<std::int32_t>(options_.limits.size()) == graph_->num_ranks(),
             "the in-flight limit lists " + std::to_string(options_.limits.size()) +
                 " numbers for " + std::to_string(graph_->num_ranks()) +
                 " ranks; give one number, or one per rank");
  for (std::size_t rank = 0; rank < options_.limits.size(); ++rank) {
    const std::int32_t least = static_cast<std::int32_t>(graph_->stages_of(rank).size());
    RRFP_CHECK(options_.limits[rank] == 0 || options_.limits[rank] >= least,
               "the in-flight limit of " + rank_text(rank) + " is " +
                   std::to_string(options_.limits[rank]) + ", but its " + std::to_string(least) +
                   (least == 1 ? " stage needs" : " stages need") + " at least " +
                   std::to_string(least));
  }
}

void StepPlan::make_tables() {
  std::vector<TaskKind> kinds{TaskKind::kForward};
  if (options_.split_backward && !options_.forward_only) {
    kinds = {TaskKind::kForward, TaskKind::kInputGrad, TaskKind::kWeightGrad};
  } else if (!options_.forward_only) {
    kinds.push_back(TaskKind::kBackward);
  }
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    tables_.emplace_back(graph_->stages_of(rank), kinds, options_.num_microbatches);
  }
}

std::string StepPlan::kinds_text() const {
  return options_.split_backward ? "the kinds F, I and W" : "the kinds F and B";
}

// Splits the user's order by rank. Positions in its messages are those of the whole list.
StepPlan::Orders StepPlan::users_order() const {
  Orders orders(graph_->num_ranks());
  std::unordered_map<std::string, std::size_t> position_of;
  for (std::size_t position = 0; position < options_.order.size(); ++position) {
    const Task& task = options_.order[position];
    if (options_.forward_only && task.kind != TaskKind::kForward) continue;
    const bool has_stage = task.stage >= 0 && task.stage < graph_->num_stages();
    const std::int32_t rank = has_stage ? graph_->rank_of(task.stage) : 0;
    RRFP_CHECK(has_stage && tables_[rank].local(task) >= 0,
               "the order lists " + to_text(task) + " at position " + std::to_string(position) +
                   ", which is no task of this step: it has stages 0 to " +
                   std::to_string(graph_->num_stages() - 1) + ", microbatches 0 to " +
                   std::to_string(options_.num_microbatches - 1) + " and " + kinds_text());
    const auto [first, is_new] = position_of.emplace(to_text(task), position);
    RRFP_CHECK(is_new, "the order lists task " + to_text(task) + " twice, at positions " +
                           std::to_string(first->second) + " and " + std::to_string(position) +
                           "; each task of the step must appear exactly once");
    orders[rank].push_back(task);
  }
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    const TaskTable& table = tables_[rank];
    const auto num_listed = static_cast<std::int32_t>(orders[rank].size());
    for (std::int32_t local = 0; num_listed < table.num_tasks(); ++local) {
      const std::string omitted = to_text(table.task(local));
      RRFP_CHECK(position_of.contains(omitted),
                 "the order omits task " + omitted + " of " + rank_text(rank) + ": it lists " +
                     std::to_string(num_listed) + " of the " +
                     std::to_string(table.num_tasks()) + " tasks that the rank has in a step of " +
                     std::to_string(options_.num_microbatches) +
                     " microbatches; each task of the step must appear exactly once");
    }
  }
  return orders;
}

void StepPlan::check_users_order(const Orders& orders) const {
  const std::string circle = circle_of_waits(*graph_, orders);
  RRFP_CHECK(circle.empty(), "the order can never finish with slack " +
                                 std::to_string(options_.slack) +
                                 ", because tasks wait for one another in a circle: " + circle +
                                 ". Move one of them, or use unlimited slack");
  if (options_.slack == 0) return;
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    check_first_forwards(rank, orders[rank]);
  }
}

// Bounded slack must never bar the earliest unfinished microbatch: before its first forward on a
// rank there may stand forwards of earlier microbatches alone (docs/admission.md).
void StepPlan::check_first_forwards(std::int32_t rank, const std::vector<Task>& order) const {
  std::vector<std::int32_t> place(options_.num_microbatches);
  for (std::int32_t at = 0; at < options_.num_microbatches; ++at) {
    place[options_.microbatch_order[at]] = at;
  }
  Task latest{-1, TaskKind::kForward, -1};
  for (const Task& task : order) {
    if (task.kind != TaskKind::kForward) continue;
    const bool is_first = !waits_for_rank(*graph_, task.stage, rank);
    RRFP_CHECK(!is_first || latest.stage < 0 || place[latest.microbatch] <= place[task.microbatch],
               "the order runs " + to_text(latest) + " before " + to_text(task) + " on " +
                   rank_text(rank) + ", but stage 0 has microbatch " +
                   std::to_string(task.microbatch) + " before microbatch " +
                   std::to_string(latest.microbatch) + "; with slack " +
                   std::to_string(options_.slack) +
                   " such ranks could wait for one another for ever. Use slack 0 or unlimited, or "
                   "begin microbatches in the same order on every rank");
    if (latest.stage < 0 || place[latest.microbatch] < place[task.microbatch]) latest = task;
  }
}

// A fixed order is kept as it stands, also where it asks for another order of weight gradients.
void StepPlan::check_weight_order(const Orders& orders) const {
  const auto completes = options_.split_backward ? TaskKind::kWeightGrad : TaskKind::kBackward;
  std::vector<std::size_t> next(graph_->num_stages(), 0);
  for (const auto& order : orders) {
    for (const Task& task : order) {
      if (task.kind != completes) continue;
      const std::int32_t due = options_.microbatch_order[next[task.stage]++];
      RRFP_CHECK(task.microbatch == due,
                 "the order runs " + to_text(task) + " where the weight gradients of stage " +
                     std::to_string(task.stage) + " are at microbatch " + std::to_string(due) +
                     "; with slack 0, a deterministic step needs them in the order of the "
                     "forwards of stage 0");
    }
  }
}

StepPlan::Orders StepPlan::positions_of_rule(HintRule rule, const Orders& ties) const {
  const std::shared_ptr<const StepPlan> draft(new StepPlan(graph_, options_, rule, ties));
  VirtualModel unit_times;
  unit_times.duration_ns = [](const Task& task) {
    return task.kind == TaskKind::kBackward ? 2 : 1;  // a B is an I and a W
  };
  unit_times.arrival_ns = [](const Task&, std::int32_t, std::int64_t now_ns) { return now_ns; };
  const VirtualOutcome outcome = run_virtually(draft, unit_times);
  RRFP_INVARIANT(outcome.finished, "a rule did not finish its own unit-time execution");
  Orders orders(graph_->num_ranks());
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    for (const VirtualTask& ran : outcome.ranks[rank]) orders[rank].push_back(ran.task);
  }
  return orders;
}

void StepPlan::set_orders(HintRule rule, const Orders& orders) {
  orders_.reserve(graph_->num_ranks());
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    orders_.emplace_back(tables_[rank], rule, orders[rank], &memory_);
  }
}

void StepPlan::set_limits() {
  if (options_.forward_only) {
    limits_.assign(graph_->num_ranks(), kUnlimited);
    return;
  }
  limits_ = options_.limits;
  limits_.resize(graph_->num_ranks(), 0);
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    const std::int32_t peak = orders_[rank].peak_units();
    if (limits_[rank] == 0) {
      limits_[rank] = limit_bytes(rank) != kUnlimited ? kUnlimited
                      : options_.slack == 0           ? peak
                                      : default_limit_units(*graph_, options_.microbatch_order);
    }
    RRFP_CHECK(options_.slack != 0 || limits_[rank] >= peak,
               "the in-flight limit of " + rank_text(rank) + " is " +
                   std::to_string(limits_[rank]) + ", but hint \"" + options_.hint +
                   "\" with slack 0 needs " + std::to_string(peak) +
                   " there; raise max_in_flight to " + std::to_string(peak) +
                   ", or allow slack so that forwards can wait");
  }
}

ArbiterOptions StepPlan::arbiter_options(std::int32_t rank) const {
  // That of the levels holds only where every rank keeps it.
  const bool is_levelled = graph_->is_chain() && options_.slack == kUnlimited &&
                           !options_.weight_in_order && !counts_bytes();
  const auto chunks_of = [&](const std::vector<std::int32_t>& stages) {
    std::vector<bool> chunks;
    if (stages.empty()) return chunks;
    for (const std::int32_t stage : graph_->stages_of(rank)) {
      chunks.push_back(std::find(stages.begin(), stages.end(), stage) != stages.end());
    }
    return chunks;
  };
  return {.slack = options_.slack,
          .limit_units = limits_.at(rank),
          .admission = is_levelled ? AdmissionRule::kLevelled : AdmissionRule::kEarliest,
          .limit_bytes = limit_bytes(rank),
          .forward_bytes = forward_bytes(rank),
          .units_returned = !options_.forward_only,
          .weight_in_order = options_.weight_in_order,
          .forward_in_order = chunks_of(options_.forward_in_order),
          .input_in_order = chunks_of(options_.input_in_order),
          .forward_patience = forward_patience_,
          .weight_patience = weight_patience_};
}

}  // namespace rrfp
