// RuntimeWorld: a seeded run of a few steps by the real RankRuntimes over a simulated network,
// with one thing that goes wrong, and its judge. What must hold, whatever the seed:
//   - every rank ends, within a bounded virtual time after the fault;
//   - with no fault, or one that changes nothing, every rank finishes every step, and the last
//     one keeps all promises of StepChecker;
//   - otherwise all ranks that live end with the same failure, and none is two steps ahead;
//   - no task that was given another input than its own is part of a step that finishes;
//   - nothing is left behind: no message, no buffer, no output.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "idle_checker.hpp"
#include "random_step.hpp"
#include "sim_rank.hpp"
#include "step_checkers.hpp"
#include "world_counts.hpp"

namespace rrfp::test {

enum class Mutant : std::uint8_t {
  kNone, kForgetsWaiter, kStaleAccepted, kWrongConsumer, kLeavesMessage, kTakesAnyHeader,
  kComputedOnArrival, kComputedEarly
};

class RuntimeWorld {
 public:
  explicit RuntimeWorld(std::uint64_t seed, WorldCaps caps = {}, Mutant mutant = Mutant::kNone)
      : seed_(seed), mutant_(mutant), random_(seed * 7 + 1), step_(seed, caps) {
    is_chain_ = draw(0, 3) != 0;
    script_.plan = is_chain_ ? step_.plan() : graph_plan();
    script_.duration_ns = [this](const Task& task) { return step_.duration_ns(task); };
    script_.num_steps = static_cast<std::uint32_t>(draw(1, 3));
    if (seed / 2 % 2 == 0) script_.starts_ns = kMeasuredNs;
    script_.swaps_consumers = mutant == Mutant::kWrongConsumer;
    script_.forgets_leftovers = mutant == Mutant::kLeavesMessage;
    fault_ = Fault(seed, step_.num_ranks(),
                   static_cast<std::int32_t>(step_.kinds().size()) * step_.num_microbatches(),
                   script_.num_steps);
  }

  // Empty, or what is wrong.
  std::string run(WorldCounts& counts) {
    virtual_ns() = kStartNs;
    SimEvents events;
    SimNetwork network(step_.num_ranks(), network_model(), events);
    std::string wrong = run_in(events, network, counts);
    if (wrong.empty() && network.live_buffers != 0) {
      wrong = std::to_string(network.live_buffers) + " received messages were left behind";
    }
    if (wrong.empty()) return "";
    return "seed " + std::to_string(seed_) + ": " + wrong + " (" + step_.text() +
           (is_chain_ ? "" : ", graph with skips") + ", " + std::to_string(script_.num_steps) +
           " steps, " + fault_.text() + ")";
  }

  const RandomStep& step() const { return step_; }

 private:
  static constexpr std::int64_t kStartNs = 1000000;
  static constexpr std::int64_t kTickNs = 1000000;
  static constexpr std::int64_t kEndsWithinNs = 400000000;  // of the fault: all time-outs together
  static constexpr std::int64_t kMeasuredNs = 12000000;  // the ranks know each other's clocks
  static constexpr std::int64_t kHorizonNs = 2000000000;

  std::int64_t draw(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }

  NetworkModel network_model() {
    NetworkModel model;
    model.latency_ns = [this](const Task& from) { return step_.latency_ns(from); };
    const std::int64_t slowest_ns = fault_.kind <= FaultKind::kAgain ? 0 : draw(0, 1) * 20000;
    model.control_latency_ns = [this, slowest_ns] { return slowest_ns ? draw(0, slowest_ns) : 0; };
    model.fifo_payloads = step_.fifo_links();
    model.fault = fault_;
    if (mutant_ == Mutant::kForgetsWaiter) model.forgotten_rank = step_.num_ranks() - 1;
    model.stale_is_current = mutant_ == Mutant::kStaleAccepted;
    model.header_is_unchecked = mutant_ == Mutant::kTakesAnyHeader;
    if (mutant_ == Mutant::kComputedOnArrival) model.computed_early_ns = kOnArrival;
    if (mutant_ == Mutant::kComputedEarly) model.computed_early_ns = 20000;
    return model;
  }

  // The chain and a few edges that skip stages, so that outputs have several consumers.
  std::shared_ptr<const StepPlan> graph_plan() {
    std::vector<std::int32_t> ranks;
    std::set<std::pair<std::int32_t, std::int32_t>> edges;
    for (std::int32_t stage = 0; stage < step_.num_stages(); ++stage) {
      ranks.push_back(step_.rank_of(stage));
      if (stage > 0) edges.emplace(stage - 1, stage);
      if (stage > 1 && draw(0, 1) == 1) edges.emplace(draw(0, stage - 2), stage);
    }
    StepOptions options;
    options.num_microbatches = step_.num_microbatches();
    options.split_backward = step_.options().split_backward;
    options.weight_in_order = step_.options().weight_in_order;
    options.hint = std::vector<std::string>{"auto", "bf", "gpipe", "b-priority"}[draw(0, 3)];
    options.slack = std::vector<std::int32_t>{kUnlimited, 2}[draw(0, 1)];
    return std::make_shared<StepPlan>(
        std::make_shared<StageGraph>(
            step_.num_ranks(), ranks,
            std::vector<std::pair<std::int32_t, std::int32_t>>(edges.begin(), edges.end()),
            std::vector<std::int32_t>{}),
        options);
  }

  std::string run_in(SimEvents& events, SimNetwork& network, WorldCounts& counts) {
    std::vector<std::unique_ptr<SimRank>> ranks;
    for (std::int32_t rank = 0; rank < step_.num_ranks(); ++rank) {
      ranks.push_back(std::make_unique<SimRank>(network, rank, script_));
      tick(events, network, *ranks.back(), rank);
    }
    for (auto& rank : ranks) rank->pump();
    std::int64_t ended_ns = 0;
    while (true) {
      const auto runs = [&](std::int32_t rank) {
        return !ranks[rank]->is_over() && !network.endpoints[rank].is_stopped;
      };
      bool any_runs = false;
      for (std::int32_t rank = 0; rank < step_.num_ranks(); ++rank) any_runs |= runs(rank);
      if (!any_runs) {
        if (!resume_stopped(network)) break;
        continue;
      }
      const std::int64_t now_ns = events.next_ns();
      if (now_ns > kHorizonNs) return "not over within 2 s of virtual time";
      while (!events.empty() && events.next_ns() == now_ns) events.run_one();
      for (std::int32_t rank = 0; rank < step_.num_ranks(); ++rank) {
        if (runs(rank)) ranks[rank]->pump();
      }
      ended_ns = now_ns;
    }
    // What is still on its way finds nobody.
    while (!events.empty()) events.run_one();
    const std::string wrong = judge(network, ranks, ended_ns);
    counts.add(fault_, !is_chain_, network, ranks);
    counts.add(step_);
    return wrong;
  }

  void tick(SimEvents& events, SimNetwork& network, SimRank& rank, std::int32_t number) {
    if (rank.is_over()) return;
    if (!network.endpoints[number].is_stopped) rank.runtime().tick(virtual_ns());
    events.at(virtual_ns() + kTickNs, number,
              [&, number] { tick(events, network, rank, number); });
  }

  bool resume_stopped(SimNetwork& network) {
    bool any = false;
    for (std::int32_t rank = 0; rank < step_.num_ranks(); ++rank) {
      if (!network.endpoints[rank].is_stopped) continue;
      network.resume(rank);
      any = true;
    }
    return any;
  }

  std::string judge(const SimNetwork& network, const std::vector<std::unique_ptr<SimRank>>& ranks,
                    std::int64_t ended_ns) const {
    std::int64_t fault_ns = network.fault_ns;
    std::uint32_t most = 0, least = script_.num_steps;
    const SimRank* failed = nullptr;
    for (const auto& rank : ranks) {
      if (rank->num_live_outputs() != 0) return "outputs were left behind";
      fault_ns = std::max(fault_ns, rank->fault_ns());
      most = std::max(most, rank->num_finished());
      if (rank->phase() != SimRank::Phase::kDead) least = std::min(least, rank->num_finished());
      if (rank->phase() == SimRank::Phase::kFailed && failed == nullptr) failed = rank.get();
    }
    for (const auto& rank : ranks) {
      if (!rank->wrong().empty() && (failed == nullptr || fault_.kind != FaultKind::kCorrupt)) {
        return rank->wrong();
      }
    }
    if (most > least + 1) return "a rank finished two steps more than another";
    if (failed != nullptr && fault_ns < 0) {
      return "a step without a fault failed: " + failed->status().message;
    }
    if (failed == nullptr) return judge_finished(ranks, fault_ns);
    if (ended_ns > fault_ns + kEndsWithinNs) return "the ranks learnt of the fault too late";
    return judge_failure(ranks, *failed);
  }

  std::string judge_finished(const std::vector<std::unique_ptr<SimRank>>& ranks,
                             std::int64_t fault_ns) const {
    const bool may_finish = fault_.kind <= FaultKind::kCorrupt || fault_ns < 0;
    if (!may_finish) return "every rank finished in spite of the fault";
    if (!is_chain_ || fault_.kind > FaultKind::kAgain) return "";
    Schedule schedule{true, {}, {}};
    for (const auto& rank : ranks) {
      schedule.ranks.push_back(rank->ran());
      schedule.peak_units.push_back(rank->peak_units());
    }
    const std::string wrong =
        StepChecker(step_, *script_.plan, schedule, script_.num_steps > 1).verdict();
    std::vector<StepTimes> times;
    for (const auto& rank : ranks) times.push_back(rank->times());
    const bool are_measured = ranks[0]->begun_ns() >= kMeasuredNs;
    return wrong.empty() ? IdleChecker(step_, schedule, are_measured).verdict(times) : wrong;
  }

  // A broken connection is two words for one thing: who closed it, and that it is closed.
  std::string judge_failure(const std::vector<std::unique_ptr<SimRank>>& ranks,
                            const SimRank& failed) const {
    const bool is_broken = is_of_a_message(fault_.kind) && fault_.kind != FaultKind::kAgain;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const SimRank& other = *ranks[rank];
      if (other.phase() == SimRank::Phase::kDead) continue;
      if (other.phase() == SimRank::Phase::kDone) {
        // The fault struck a word about the end of the last step.
        if (failed.num_finished() + 1 >= script_.num_steps) continue;
        return "rank " + std::to_string(rank) + " finished, another failed";
      }
      const Status& status = other.status();
      const bool is_one_of_two = is_broken && status.code != StatusCode::kStalled &&
                                 failed.status().code != StatusCode::kStalled &&
                                 (status.code == StatusCode::kPeerLost ||
                                  status.code == StatusCode::kProtocol);
      if (is_one_of_two) continue;
      if (status.code != failed.status().code ||
          (status.origin_rank != failed.status().origin_rank && !is_broken &&
           status.code != StatusCode::kStalled)) {
        return "rank " + std::to_string(rank) + " ended with " + text(status) + ", another with " +
               text(failed.status());
      }
    }
    return "";
  }

  static std::string text(const Status& status) {
    return "code " + std::to_string(static_cast<int>(status.code)) + " of rank " +
           std::to_string(status.origin_rank) + " (" + status.message.substr(0, 80) + ")";
  }

  const std::uint64_t seed_;
  const Mutant mutant_;
  std::mt19937_64 random_;
  RandomStep step_;
  bool is_chain_ = true;
  StepScript script_;
  Fault fault_;
};

}  // namespace rrfp::test
