// AdmissionWorld: the ranks of a pipeline with one arbiter each, and an adversary who decides
// when each message arrives and which rank moves next. search() visits every reachable state
// and looks for one in which nothing can move and not everything has run.
//
// A microbatch passes its 2S tasks (F of stages 0..S-1, B of S-1..0) in order, so its whole
// state is one number: 2k, task k is under way; 2k + 1, it has arrived; 4S, all have run. Stage
// s is on rank s mod P (the loop), its chunk is s / P. Arbiters are brought to a state by
// replaying the moves that first led there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "arbiter/arbiter.hpp"

namespace rrfp::test {

struct AdmissionCase {
  std::int32_t num_ranks = 1, num_chunks = 1, num_microbatches = 1;
  HintRule rule = HintRule::kOrder;
  std::vector<std::vector<Task>> orders;  // by rank
  std::int32_t slack = kUnlimited;
  AdmissionRule admission = AdmissionRule::kLevelled;
  bool weight_in_order = false;
  bool all_in_order = false;  // F and I as well
  std::vector<std::int32_t> limits;       // by rank
};

struct SearchResult {
  std::int64_t states = 0;
  std::string deadlock;  // the moves that lead there; empty: there is none
};

template <class ArbiterUnderTest>
class AdmissionWorld {
 public:
  explicit AdmissionWorld(const AdmissionCase& of) : case_(of) {
    for (std::int32_t rank = 0; rank < of.num_ranks; ++rank) {
      std::vector<std::int32_t> stages;
      for (std::int32_t c = 0; c < of.num_chunks; ++c) stages.push_back(c * of.num_ranks + rank);
      tables_.emplace_back(stages, std::vector{TaskKind::kForward, TaskKind::kBackward},
                           of.num_microbatches);
      orders_.push_back(std::make_unique<HintOrder>(tables_.back(), of.rule, of.orders[rank]));
    }
    for (std::int32_t m = 0; m < of.num_microbatches; ++m) places_.push_back(m);
  }

  SearchResult search() {
    visit(State(state_bytes(), '\0'), kNoNode, 0);
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if (!expand(n)) return {static_cast<std::int64_t>(nodes_.size()), moves_to(n)};
    }
    return {static_cast<std::int64_t>(nodes_.size()), ""};
  }

 private:
  // Progress by microbatch, then the round by rank: a byte that tells what BF and FB remember.
  using State = std::string;
  enum Round : char { kClosed = 0, kAfterForward = 1, kAfterBackward = 2 };

  // A move is a microbatch whose message arrives, or M + rank for a rank that asks its arbiter.
  struct Node {
    State state;
    std::size_t parent;
    std::int32_t move;
  };
  static constexpr std::size_t kNoNode = SIZE_MAX;

  std::size_t state_bytes() const {
    return static_cast<std::size_t>(case_.num_microbatches + case_.num_ranks);
  }
  std::int32_t num_stages() const { return case_.num_ranks * case_.num_chunks; }
  bool is_done(std::int32_t progress) const { return progress == 4 * num_stages(); }

  Task task_at(std::int32_t microbatch, std::int32_t progress) const {
    const std::int32_t k = progress / 2;
    if (k < num_stages()) return {k, TaskKind::kForward, microbatch};
    return {2 * num_stages() - 1 - k, TaskKind::kBackward, microbatch};
  }

  void visit(const State& state, std::size_t parent, std::int32_t move) {
    if (visited_.insert(state).second) nodes_.push_back({state, parent, move});
  }

  std::vector<std::int32_t> path_to(std::size_t n) const {
    std::vector<std::int32_t> moves;
    for (; nodes_[n].parent != kNoNode; n = nodes_[n].parent) moves.push_back(nodes_[n].move);
    std::reverse(moves.begin(), moves.end());
    return moves;
  }

  // Fresh arbiters, and one task per move: the one that arrived or was claimed.
  std::vector<Task> replay(std::size_t n, std::vector<std::unique_ptr<ArbiterUnderTest>>& ranks) {
    for (std::int32_t rank = 0; rank < case_.num_ranks; ++rank) {
      const std::vector<bool> in_order(case_.all_in_order ? tables_[rank].num_chunks() : 0, true);
      const ArbiterOptions options{.slack = case_.slack,
                                   .limit_units = case_.limits[rank],
                                   .admission = case_.admission,
                                   .weight_in_order = case_.weight_in_order,
                                   .forward_in_order = in_order,
                                   .input_in_order = in_order};
      ranks.push_back(std::make_unique<ArbiterUnderTest>(tables_[rank], *orders_[rank], options,
                                                         places_));
    }
    std::vector<std::int32_t> progress(case_.num_microbatches, 0);
    std::vector<Task> trail;
    for (const std::int32_t move : path_to(n)) {
      if (move < case_.num_microbatches) {
        const Task task = task_at(move, progress[move]++);
        const std::int32_t rank = task.stage % case_.num_ranks;
        ranks[rank]->arrive(tables_[rank].local(task));
        trail.push_back(task);
      } else {
        const std::int32_t rank = move - case_.num_microbatches;
        const Choice choice = ranks[rank]->select();
        if (choice.local < 0) continue;  // it asked in vain, and its round ended
        ranks[rank]->commit(choice);
        trail.push_back(tables_[rank].task(choice.local));
        ++progress[trail.back().microbatch];
      }
    }
    return trail;
  }

  // All moves from a node. False: there is none, and tasks are left.
  bool expand(std::size_t n) {
    const State from = nodes_[n].state;
    std::vector<std::unique_ptr<ArbiterUnderTest>> ranks;
    replay(n, ranks);
    bool moved = false, all_done = true;
    for (std::int32_t m = 0; m < case_.num_microbatches; ++m) {
      all_done &= is_done(from[m]);
      if (is_done(from[m]) || from[m] % 2 != 0) continue;
      State next = from;
      ++next[m];
      visit(next, n, m);
      moved = true;
    }
    const bool has_rounds = case_.rule == HintRule::kBackwardForward ||
                            case_.rule == HintRule::kForwardBackward;
    for (std::int32_t rank = 0; rank < case_.num_ranks; ++rank) {
      const Choice choice = ranks[rank]->select();
      State next = from;
      char& round = next[case_.num_microbatches + rank];
      round = kClosed;
      if (choice.local >= 0) {
        const Task task = tables_[rank].task(choice.local);
        ++next[task.microbatch];
        if (has_rounds) round = task.kind == TaskKind::kForward ? kAfterForward : kAfterBackward;
        moved = true;
      }
      visit(next, n, case_.num_microbatches + rank);
    }
    return moved || all_done;
  }

  std::string moves_to(std::size_t n) {
    std::vector<std::unique_ptr<ArbiterUnderTest>> ranks;
    std::string text;
    for (const Task& task : replay(n, ranks)) {
      text.append(text.empty() ? "" : " ").append(to_text(task));
    }
    return text;
  }

  const AdmissionCase& case_;
  std::vector<TaskTable> tables_;
  std::vector<std::unique_ptr<HintOrder>> orders_;
  std::vector<std::int32_t> places_;
  std::vector<Node> nodes_;
  std::unordered_set<State> visited_;
};

}  // namespace rrfp::test
