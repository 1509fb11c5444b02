#include "sim/world.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace rrfp::sim {

namespace {

// The links between ranks: when each message arrives, and what that did to their order.
class Network {
 public:
  Network(const StageGraph& graph, const WorldOptions& options, WorldResult& result)
      : graph_(graph), options_(options), result_(result), links_(graph.num_ranks()) {}

  std::int64_t arrival_ns(const Task& from, std::int32_t target_stage, std::int64_t now_ns) {
    const std::int64_t latency_ns = options_.latency_ns(from, target_stage);
    RRFP_CHECK(latency_ns >= 0, "the message of " + to_text(from) + " to stage " +
                                    std::to_string(target_stage) + " would take a negative time");
    ++result_.messages;
    if (options_.is_lost && options_.is_lost(from, target_stage)) {
      ++result_.lost;
      return kNever;
    }
    std::int64_t& latest_ns =
        latest_arrival_ns(graph_.rank_of(from.stage), graph_.rank_of(target_stage));
    std::int64_t at_ns = now_ns + latency_ns;
    if (options_.fifo_links) at_ns = std::max(at_ns, latest_ns);
    if (at_ns < latest_ns) ++result_.reordered;
    latest_ns = std::max(latest_ns, at_ns);
    arrival_ns_ = at_ns;
    return at_ns;
  }

  // For the message that arrival_ns() was asked about last.
  std::int64_t again_ns(const Task& from, std::int32_t target_stage) {
    const std::int64_t after_ns = options_.again_after_ns(from, target_stage);
    if (after_ns < 0) return kNever;
    ++result_.duplicates;
    return arrival_ns_ + after_ns;
  }

 private:
  struct Link {
    std::int32_t to = -1;
    std::int64_t latest_arrival_ns = 0;
  };

  std::int64_t& latest_arrival_ns(std::int32_t from, std::int32_t to) {
    auto& links = links_[from];
    const auto link =
        std::find_if(links.begin(), links.end(), [&](const Link& l) { return l.to == to; });
    return link != links.end() ? link->latest_arrival_ns
                               : links.emplace_back(Link{to, 0}).latest_arrival_ns;
  }

  const StageGraph& graph_;
  const WorldOptions& options_;
  WorldResult& result_;
  std::vector<std::vector<Link>> links_;  // by sending rank: those that it has used
  std::int64_t arrival_ns_ = 0;
};

}  // namespace

WorldResult simulate(std::shared_ptr<const StepPlan> plan, const WorldOptions& options) {
  WorldResult result;
  Network network(plan->graph(), options, result);
  VirtualModel model;
  model.duration_ns = options.duration_ns;
  model.arrival_ns = [&](const Task& from, std::int32_t target_stage, std::int64_t now_ns) {
    return network.arrival_ns(from, target_stage, now_ns);
  };
  if (options.again_after_ns) {
    model.again_ns = [&](const Task& from, std::int32_t target_stage, std::int64_t) {
      return network.again_ns(from, target_stage);
    };
  }
  model.announcement_lag_ns = options.announcement_lag_ns;
  model.times = options.times;
  model.on_choice = [&](std::int32_t, const Choice& choice) {
    if (choice.blocked == Blocked::kLimit) ++result.limit_hits;
    if (choice.blocked == Blocked::kSlack) ++result.slack_hits;
    if (choice.blocked == Blocked::kHint) ++result.hint_waits;
    if (choice.overtaken > 0) ++result.overtakes;
  };
  VirtualOutcome outcome = run_virtually(std::move(plan), model);
  result.finished = outcome.finished;
  result.makespan_ns = outcome.makespan_ns;
  result.ranks = std::move(outcome.ranks);
  result.peak_units = std::move(outcome.peak_units);
  return result;
}

}  // namespace rrfp::sim
