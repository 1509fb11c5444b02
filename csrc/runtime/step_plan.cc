#include "runtime/step_plan.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <unordered_map>

#include "base/check.hpp"
#include "runtime/fixed_order.hpp"
#include "runtime/virtual_run.hpp"

namespace rrfp {

namespace {

constexpr const char* kUsersOrder = "order";
constexpr const char* kHintNames = "gpipe, 1f1b, bf, fb, b-priority, f-priority and auto";

std::optional<HintRule> rule_of(const std::string& hint) {
  if (hint == "gpipe" || hint == "1f1b" || hint == kUsersOrder) return HintRule::kOrder;
  if (hint == "bf" || hint == "auto") return HintRule::kBackwardForward;
  if (hint == "fb") return HintRule::kForwardBackward;
  if (hint == "b-priority") return HintRule::kBackwardPriority;
  if (hint == "f-priority") return HintRule::kForwardPriority;
  return std::nullopt;
}

std::string rank_text(std::int32_t rank) { return "rank " + std::to_string(rank); }

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
  const HintRule rule = *rule_of(options_.hint);
  if (options_.hint == kUsersOrder) {
    const Orders orders = users_order();
    set_orders(rule, orders);  // refuses an order that omits a task
    options_.microbatch_order = forwards_of(orders[graph_->rank_of(0)], 0);
    if (options_.slack != kUnlimited) check_users_order(orders);
  } else if (rule == HintRule::kOrder || options_.forward_only) {
    // Forwards alone: every hint is the microbatch order.
    set_orders(rule, named_order(rule));
  } else {
    set_orders(rule, positions_of_rule(rule));
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

void StepPlan::check_options() {
  const auto& hint = options_.hint;
  RRFP_CHECK(rule_of(hint), "hint \"" + hint + "\" is not known; the hints are " + kHintNames +
                                ", or an order of your own");
  RRFP_CHECK(hint == kUsersOrder || graph_->max_stages_per_rank() == 1,
             "hint \"" + hint + "\" with " + std::to_string(graph_->max_stages_per_rank()) +
                 " stages on one rank: several stages per rank are not supported yet; use one "
                 "rank per stage");
  RRFP_CHECK(hint != "1f1b" || graph_->is_chain(),
             "hint \"1f1b\" needs a chain of stages; use bf for other graphs");
  RRFP_CHECK(options_.num_microbatches >= 1, "a step needs at least 1 microbatch, got " +
                                                 std::to_string(options_.num_microbatches));
  RRFP_CHECK(options_.slack >= 0 || options_.slack == kUnlimited,
             "slack must be 0 or more positions, or unlimited; got " +
                 std::to_string(options_.slack));
  RRFP_CHECK(options_.limits.empty() ||
                 static_cast<std::int32_t>(options_.limits.size()) == graph_->num_ranks(),
             "the in-flight limit lists " + std::to_string(options_.limits.size()) +
                 " numbers for " + std::to_string(graph_->num_ranks()) +
                 " ranks; give one number, or one per rank");
  for (std::size_t rank = 0; rank < options_.limits.size(); ++rank) {
    const std::int32_t least = static_cast<std::int32_t>(graph_->stages_of(rank).size());
    RRFP_CHECK(options_.limits[rank] >= least,
               "the in-flight limit of " + rank_text(rank) + " is " +
                   std::to_string(options_.limits[rank]) + ", but its " + std::to_string(least) +
                   (least == 1 ? " stage needs" : " stages need") + " at least " +
                   std::to_string(least));
  }
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

void StepPlan::make_tables() {
  std::vector<TaskKind> kinds{TaskKind::kForward};
  if (!options_.forward_only) kinds.push_back(TaskKind::kBackward);
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    tables_.emplace_back(graph_->stages_of(rank), kinds, options_.num_microbatches);
  }
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
                   std::to_string(options_.num_microbatches - 1) + " and the kinds F and B");
    const auto [first, is_new] = position_of.emplace(to_text(task), position);
    RRFP_CHECK(is_new, "the order lists task " + to_text(task) + " twice, at positions " +
                           std::to_string(first->second) + " and " + std::to_string(position) +
                           "; each task of the step must appear exactly once");
    orders[rank].push_back(task);
  }
  return orders;
}

void StepPlan::check_users_order(const Orders& orders) const {
  const std::string circle = circle_of_waits(*graph_, orders);
  const std::string slack = "slack " + std::to_string(options_.slack);
  RRFP_CHECK(circle.empty(), "the order can never finish with " + slack +
                                 ", because tasks wait for one another in a circle: " + circle +
                                 ". Move one of them, or use unlimited slack");
  if (options_.slack == 0) return;
  RRFP_CHECK(graph_->max_stages_per_rank() == 1,
             slack + " with several stages on one rank is not supported yet; use 0 or unlimited");
  for (std::int32_t stage = 1; stage < graph_->num_stages(); ++stage) {
    const auto forwards = forwards_of(orders[graph_->rank_of(stage)], stage);
    const auto [here, there] = std::mismatch(forwards.begin(), forwards.end(),
                                             options_.microbatch_order.begin());
    if (here == forwards.end()) continue;
    throw UserError("the order runs the forwards of stage " + std::to_string(stage) +
                    " in another order of microbatches than those of stage 0 (" +
                    std::to_string(*here) + " where stage 0 has " + std::to_string(*there) +
                    "); with " + slack +
                    " such ranks could wait for one another for ever. Use slack 0 or unlimited, "
                    "or the same order of forwards on every rank");
  }
}

StepPlan::Orders StepPlan::named_order(HintRule rule) const {
  Orders orders;
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    const std::int32_t stage = graph_->stages_of(rank).front();
    std::vector<Task> order;
    if (rule == HintRule::kOrder && options_.hint == "1f1b") {
      order = one_f_one_b_order(stage, graph_->num_stages(), options_.microbatch_order);
    } else {
      order = gpipe_order(stage, options_.microbatch_order);
    }
    if (options_.forward_only) {
      std::erase_if(order, [](const Task& task) { return task.kind != TaskKind::kForward; });
    }
    orders.push_back(std::move(order));
  }
  return orders;
}

StepPlan::Orders StepPlan::positions_of_rule(HintRule rule) const {
  const std::shared_ptr<const StepPlan> draft(
      new StepPlan(graph_, options_, rule, named_order(rule)));
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
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    orders_.emplace_back(tables_[rank], rule, orders[rank]);
  }
}

void StepPlan::set_limits() {
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    const auto num_stages = static_cast<std::int32_t>(graph_->stages_of(rank).size());
    const std::int32_t peak = options_.forward_only ? 0 : orders_[rank].peak_units();
    if (options_.forward_only) {
      limits_.push_back(kUnlimited);
    } else if (!options_.limits.empty()) {
      limits_.push_back(options_.limits[rank]);
      RRFP_CHECK(options_.slack != 0 || limits_.back() >= peak,
                 "the in-flight limit of " + rank_text(rank) + " is " +
                     std::to_string(limits_.back()) + ", but hint \"" + options_.hint +
                     "\" with slack 0 needs " + std::to_string(peak) +
                     " there; raise max_in_flight to " + std::to_string(peak) +
                     ", or allow slack so that forwards can wait");
    } else if (options_.slack == 0) {
      limits_.push_back(peak);
    } else {
      limits_.push_back(num_stages == 1 ? graph_->num_ranks() : std::max(peak, num_stages));
    }
  }
}

ArbiterOptions StepPlan::arbiter_options(std::int32_t rank) const {
  const bool is_levelled = graph_->is_chain() && options_.slack == kUnlimited;
  return {.slack = options_.slack,
          .limit_units = limits_.at(rank),
          .admission = is_levelled ? AdmissionRule::kLevelled : AdmissionRule::kEarliest,
          .units_returned = !options_.forward_only};
}

}  // namespace rrfp
