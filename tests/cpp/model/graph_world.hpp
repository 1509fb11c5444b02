// GraphWorld: the ranks of a plan (any stage graph, B or I and W) with one real arbiter each, and
// an adversary who decides when each message arrives. search() visits every set of claimed tasks
// that can be reached, and looks for one in which all that can arrive has arrived, no rank finds
// a task, and not everything has run.
//
// Why sets are enough   What a rank may claim follows from the set it has claimed (units, the
//              earliest microbatch, the first unclaimed position, the places of classes in
//              order), not from their sequence; what is ready besides only decides which of
//              several is preferred. A task that an arbiter picks among others it also picks
//              alone, so an adversary who lets tasks arrive one by one reaches every set. What
//              an arbiter says is asked once for each set and kept.
//              admission_world.hpp searches sequences instead; both must agree.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arbiter/arbiter.hpp"
#include "base/check.hpp"
#include "runtime/step_plan.hpp"

namespace rrfp::test {

template <class ArbiterUnderTest>
class GraphWorld {
 public:
  // `limits` and `admission` take the place of the plan's own.
  GraphWorld(const StepPlan& plan, std::vector<std::int32_t> limits, AdmissionRule admission)
      : plan_(plan), limits_(std::move(limits)), admission_(admission) {
    places_.resize(plan.num_microbatches());
    for (std::int32_t at = 0; at < plan.num_microbatches(); ++at) {
      places_[plan.microbatch_order()[at]] = at;
    }
    for (std::int32_t rank = 0; rank < plan.graph().num_ranks(); ++rank) {
      first_bit_.push_back(num_tasks_);
      num_tasks_ += plan.table(rank).num_tasks();
      knowledge_.push_back({});
      knowledge_.back().path[0] = {};
    }
    RRFP_INVARIANT(num_tasks_ < 64, "the set of claimed tasks is one word");
    for (std::int32_t rank = 0; rank < plan.graph().num_ranks(); ++rank) {
      for (std::int32_t local = 0; local < plan.table(rank).num_tasks(); ++local) {
        needs_.push_back(needs_of(plan.table(rank).task(local)));
        rank_of_bit_.push_back(rank);
      }
    }
  }

  // The number of sets seen, and the tasks that lead to a deadlock (empty: there is none).
  std::pair<std::int64_t, std::string> search() {
    std::vector<Node> nodes{{0, 0, -1}};
    std::unordered_set<Set> visited{0};
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      const Set claimed = nodes[n].claimed;
      const Set ready = ready_in(claimed);
      bool moves = claimed == everything();
      for (std::int32_t rank = 0; rank < plan_.graph().num_ranks(); ++rank) {
        const Set here = ready & mask_of(rank);
        moves |= here != 0 && choice(rank, claimed, here) >= 0;
        for (Set left = here; left != 0; left &= left - 1) {
          const std::int32_t bit = std::countr_zero(left);
          const Set next = claimed | Set{1} << bit;
          if (visited.contains(next)) continue;
          if (choice(rank, claimed, Set{1} << bit) < 0) continue;
          remember(rank, claimed, bit);
          visited.insert(next);
          nodes.push_back({next, n, bit});
        }
      }
      if (!moves) return {static_cast<std::int64_t>(nodes.size()), moves_to(nodes, n)};
    }
    return {static_cast<std::int64_t>(nodes.size()), ""};
  }

 private:
  using Set = std::uint64_t;  // of tasks, those of one rank side by side
  struct Node {
    Set claimed;
    std::size_t parent;
    std::int32_t bit;
  };
  struct Question {
    Set claimed, arrived;
    bool operator==(const Question&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Question& q) const {
      return (q.claimed * 0x9e3779b97f4a7c15u) ^ (q.arrived * 0xc2b2ae3d27d4eb4fu);
    }
  };
  // What the arbiter of a rank has said, and for each set one sequence that leads to it.
  struct Knowledge {
    std::unordered_map<Question, std::int32_t, Hash> choice;
    std::unordered_map<Set, std::vector<std::int32_t>> path;
  };

  Set everything() const { return (Set{1} << num_tasks_) - 1; }
  Set mask_of(std::int32_t rank) const {
    return ((Set{1} << plan_.table(rank).num_tasks()) - 1) << first_bit_[rank];
  }
  Set bit_of(std::int32_t stage, TaskKind kind, std::int32_t microbatch) const {
    const std::int32_t rank = plan_.graph().rank_of(stage);
    return Set{1} << (first_bit_[rank] + plan_.table(rank).local({stage, kind, microbatch}));
  }

  Set needs_of(const Task& task) const {
    Set needs = 0;
    if (task.kind == TaskKind::kWeightGrad) {
      return bit_of(task.stage, TaskKind::kInputGrad, task.microbatch);
    }
    if (task.kind == TaskKind::kForward) {
      for (const std::int32_t source : plan_.graph().sources_of(task.stage)) {
        needs |= bit_of(source, task.kind, task.microbatch);
      }
      return needs;
    }
    needs = bit_of(task.stage, TaskKind::kForward, task.microbatch);
    for (const std::int32_t consumer : plan_.graph().consumers_of(task.stage)) {
      needs |= bit_of(consumer, task.kind, task.microbatch);
    }
    return needs;
  }

  Set ready_in(Set claimed) const {
    Set ready = 0;
    for (std::int32_t bit = 0; bit < num_tasks_; ++bit) {
      if ((needs_[bit] & ~claimed) == 0) ready |= Set{1} << bit;
    }
    return ready & ~claimed;
  }

  // What the rank's arbiter picks (a local index, or -1) when these tasks have arrived.
  std::int32_t choice(std::int32_t rank, Set all_claimed, Set arrived) {
    Knowledge& known = knowledge_[rank];
    const Question question{all_claimed & mask_of(rank), arrived};
    const auto it = known.choice.find(question);
    if (it != known.choice.end()) return it->second;
    ArbiterOptions options = plan_.arbiter_options(rank);
    options.limit_units = limits_[rank];
    options.admission = admission_;
    options.forward_patience = options.weight_patience = 0;  // every wait ends
    ArbiterUnderTest arbiter(plan_.table(rank), plan_.hint_order(rank), options, places_);
    for (const std::int32_t local : known.path.at(question.claimed)) {
      arbiter.arrive(local);
      const Choice again = arbiter.select();
      RRFP_INVARIANT(again.local == local, "the arbiter does not repeat what it has done");
      arbiter.commit(again);
    }
    for (Set left = arrived; left != 0; left &= left - 1) {
      arbiter.arrive(std::countr_zero(left) - first_bit_[rank]);
    }
    return known.choice[question] = arbiter.select().local;
  }

  void remember(std::int32_t rank, Set all_claimed, std::int32_t bit) {
    Knowledge& known = knowledge_[rank];
    const Set before = all_claimed & mask_of(rank);
    const Set after = before | Set{1} << bit;
    if (known.path.contains(after)) return;
    std::vector<std::int32_t> path = known.path.at(before);
    path.push_back(bit - first_bit_[rank]);
    known.path[after] = std::move(path);
  }

  std::string moves_to(const std::vector<Node>& nodes, std::size_t n) const {
    std::string text = "";
    for (; nodes[n].bit >= 0; n = nodes[n].parent) {
      const std::int32_t rank = rank_of_bit_[nodes[n].bit];
      const Task task = plan_.table(rank).task(nodes[n].bit - first_bit_[rank]);
      text = to_text(task) + (text.empty() ? "" : " ") + text;
    }
    return text.empty() ? "the start" : text;
  }

  const StepPlan& plan_;
  const std::vector<std::int32_t> limits_;
  const AdmissionRule admission_;
  std::vector<std::int32_t> places_;
  std::int32_t num_tasks_ = 0;
  std::vector<std::int32_t> first_bit_;    // by rank
  std::vector<Set> needs_;                 // by bit
  std::vector<std::int32_t> rank_of_bit_;  // by bit
  std::vector<Knowledge> knowledge_;       // by rank
};

}  // namespace rrfp::test
