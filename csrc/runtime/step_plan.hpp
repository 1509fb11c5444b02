// StepPlan: what every rank of a step agrees on, validated before a task runs. Immutable;
// shared by the engines of all ranks of one process.
#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "arbiter/hint_order.hpp"
#include "base/large_pages.hpp"
#include "base/task.hpp"
#include "runtime/hint_policy.hpp"
#include "runtime/stage_graph.hpp"

namespace rrfp {

struct StepOptions {
  std::int32_t num_microbatches = 0;
  std::vector<std::int32_t> microbatch_order;  // empty: as given
  // A name (known_hints()), or "order" with `order` below.
  std::string hint = "auto";
  std::vector<Task> order;           // all tasks of all ranks; each rank takes its own, in order
  std::int32_t slack = kAutoSlack;
  // Units per rank; empty, or 0 for a rank: the default of the hint and slack.
  std::vector<std::int32_t> limits;
  // Bytes per rank in the place of units, kUnlimited for a rank that counts units; empty: all do.
  std::vector<std::int64_t> limits_bytes = {};
  // By stage and microbatch: what a forward holds until its backward; empty for a stage of a
  // rank that counts units.
  std::vector<std::vector<std::int64_t>> activation_bytes = {};
  bool forward_only = false;         // only F tasks, no units; other tasks of `order` are skipped
  bool split_backward = false;       // I and W in the place of B
  bool weight_in_order = false;      // W (unsplit: B) in the step's order of microbatches
  std::vector<std::int32_t> forward_in_order = {};  // stages whose F run so as well,
  std::vector<std::int32_t> input_in_order = {};    // and I; both need weight_in_order
  bool waiting = true;               // hint "auto" may wait for announced tasks, on chains
};

// Positions    Textbook orders: themselves. A rule (bf, ...): the order in which it runs itself
//              when F, I and W take 1, B takes 2 and messages take no time, under the limits.
//              "auto": policy_of(). Default limits: with slack 0 the order's own peak on each
//              rank, else default_limit_units(). A limit in bytes counts for the policy as the
//              units of mean size that fit into it.
// Never stuck  docs/admission.md proves that a step ends whatever the messages do, for orders
//              that begin microbatches alike on every rank. A user's order with bounded slack
//              must do so; with slack 0 it is run through once here instead.
// Cost         one pass over all tasks; a rule's positions cost one simulated step.
class StepPlan {
 public:
  // UserError, naming the values and the remedy, for: an order that omits, repeats or invents a
  // task; a limit below the least; a fixed order (slack 0) under which the ranks would wait for
  // one another for ever; a hint this version does not know.
  StepPlan(std::shared_ptr<const StageGraph> graph, StepOptions options);
  StepPlan(const StepPlan&) = delete;
  StepPlan& operator=(const StepPlan&) = delete;

  const StageGraph& graph() const { return *graph_; }
  const std::shared_ptr<const StageGraph>& shared_graph() const { return graph_; }
  const StepOptions& options() const { return options_; }  // the slack in place of kAutoSlack
  std::int32_t num_microbatches() const { return options_.num_microbatches; }
  bool forward_only() const { return options_.forward_only; }
  // Place by place; of a user's order: the order of its forwards of the first stage.
  const std::vector<std::int32_t>& microbatch_order() const { return options_.microbatch_order; }
  const TaskTable& table(std::int32_t rank) const { return tables_.at(rank); }
  const HintOrder& hint_order(std::int32_t rank) const { return orders_.at(rank); }
  bool split_backward() const { return options_.split_backward; }
  // The textbook order that hint "auto" might return to (sim/guard.hpp); empty: it must not.
  const std::string& guarded_order() const { return guarded_order_; }
  // Whether ranks should announce what they start: some rank may wait for it.
  bool waits() const { return forward_patience_ > 0 || weight_patience_ > 0; }
  ArbiterOptions arbiter_options(std::int32_t rank) const;
  // kUnlimited for forward-only steps, and where the limit is in bytes.
  std::int32_t limit_units(std::int32_t rank) const { return limits_.at(rank); }
  // kUnlimited where units are counted.
  std::int64_t limit_bytes(std::int32_t rank) const;

 private:
  using Orders = std::vector<std::vector<Task>>;  // by rank

  // A rule on its way to its positions: `orders` only breaks ties inside a kind.
  StepPlan(std::shared_ptr<const StageGraph> graph, StepOptions options, HintRule rule,
           const Orders& orders);

  void check_options();
  void check_limits() const;
  void check_bytes() const;
  bool counts_bytes() const;  // on some rank
  std::int32_t units_for_policy() const;
  std::vector<std::int64_t> forward_bytes(std::int32_t rank) const;
  void make_tables();
  void plan_users_order();
  void plan_named_hint();
  Orders users_order() const;
  void check_users_order(const Orders& orders) const;
  void check_first_forwards(std::int32_t rank, const std::vector<Task>& order) const;
  void check_weight_order(const Orders& orders) const;
  Orders positions_of_rule(HintRule rule, const Orders& ties) const;
  void set_orders(HintRule rule, const Orders& orders);
  void set_limits();
  std::string kinds_text() const;

  std::shared_ptr<const StageGraph> graph_;
  StepOptions options_;
  std::vector<TaskTable> tables_;
  LargePages pages_;
  std::pmr::monotonic_buffer_resource memory_{&pages_};  // of orders_
  std::vector<HintOrder> orders_;
  std::vector<std::int32_t> limits_;
  std::string guarded_order_;
  double forward_patience_ = 0;
  double weight_patience_ = 0;
};

}  // namespace rrfp
