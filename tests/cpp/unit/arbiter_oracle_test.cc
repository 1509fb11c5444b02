// Arbiter against a brute-force twin on random states: every rule, slack, limit and admission
// rule, 1-3 chunks, split, unsplit and forward-only. The twin is written from the definitions
// (sets of positions, a full scan per decision) and shares no code with the arbiter.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "arbiter/arbiter.hpp"
#include "check.hpp"

namespace rrfp {
namespace {

struct Setting {
  std::int32_t num_chunks, num_microbatches;
  std::vector<TaskKind> kinds;
  HintRule rule;
  std::vector<Task> order;
  ArbiterOptions options;
  std::vector<std::int32_t> places;  // by microbatch
};

bool gives_back(TaskKind kind) {
  return kind == TaskKind::kBackward || kind == TaskKind::kWeightGrad;
}

class Twin {
 public:
  explicit Twin(const Setting& setting) : s_(setting) {}

  std::set<std::int32_t> ready, claimed;  // positions

  struct Answer {
    std::int32_t position;
    Blocked blocked;
  };

  Answer answer() {
    Answer found = round(open_);
    if (found.position < 0 && open_) found = round(open_ = false);
    return found;
  }

  void claim(std::int32_t position) {
    ready.erase(position);
    claimed.insert(position);
    const TaskKind kind = s_.order[position].kind;
    const bool forward = kind == TaskKind::kForward;
    const bool backward = kind == TaskKind::kBackward || kind == TaskKind::kInputGrad;
    open_ = ((s_.rule == HintRule::kBackwardForward || s_.rule == HintRule::kRoundsByPosition) &&
             backward) ||
            (s_.rule == HintRule::kForwardBackward && forward);
    peak = std::max(peak, held());
  }

  std::int32_t held(std::int32_t microbatch = -1) const {
    std::int32_t units = 0;
    for (const std::int32_t p : claimed) {
      if (microbatch >= 0 && s_.order[p].microbatch != microbatch) continue;
      units += s_.order[p].kind == TaskKind::kForward ? 1 : 0;
      units -= gives_back(s_.order[p].kind) ? 1 : 0;
    }
    return s_.options.units_returned ? units : 0;
  }

  std::int32_t first_unclaimed() const {
    std::int32_t p = 0;
    while (claimed.count(p) != 0) ++p;
    return p;
  }

  std::int32_t peak = 0;

 private:
  // The best of the ready tasks that may run, when the round stands in its second half or not.
  Answer round(bool second_half) const {
    if (claimed.size() == s_.order.size()) return {-1, Blocked::kDone};
    std::map<std::tuple<int, std::int32_t, std::int32_t>, std::int32_t> best;
    bool limit = false, slack = false;
    const std::int32_t first = first_unclaimed(), kept = earliest();
    for (const std::int32_t p : ready) {
      const bool forward = s_.order[p].kind == TaskKind::kForward;
      if (s_.options.slack == 0
              ? p != first
              : must_wait_for_place(s_.order[p]) ||
                    (forward && s_.options.slack > 0 && p > first + s_.options.slack &&
                     !has_begun_earliest(s_.order[p], kept))) {
        slack = true;
      } else if (forward && s_.options.slack != 0 && !admitted(s_.order[p], kept)) {
        limit = true;
      } else {
        best[preference(p, second_half)] = p;
      }
    }
    if (!best.empty()) return {best.begin()->second, Blocked::kNot};
    return {-1, limit ? Blocked::kLimit : slack ? Blocked::kSlack : Blocked::kInput};
  }

  std::tuple<int, std::int32_t, std::int32_t> preference(std::int32_t p, bool second) const {
    const Task& task = s_.order[p];
    if (s_.rule == HintRule::kOrder || s_.options.slack == 0) return {0, 0, p};
    if (task.kind == TaskKind::kWeightGrad) return {2, 0, p};
    if (s_.rule == HintRule::kOrderThenWeight) return {0, 0, p};
    const bool forward = task.kind == TaskKind::kForward;
    bool forward_leads = s_.rule == HintRule::kForwardPriority;
    const bool by_position = s_.rule == HintRule::kRoundsByPosition;
    if (s_.rule == HintRule::kBackwardForward || by_position) forward_leads = second;
    if (s_.rule == HintRule::kForwardBackward) forward_leads = !second;
    const std::int32_t chunk = by_position ? 0 : forward ? task.stage : -task.stage;
    return {forward == forward_leads ? 0 : 1, chunk, p};
  }

  bool has_begun_earliest(const Task& task, std::int32_t earliest) const {
    return task.microbatch == earliest &&
           std::any_of(claimed.begin(), claimed.end(), [&](std::int32_t p) {
             return s_.order[p].microbatch == earliest && s_.order[p].kind == TaskKind::kForward;
           });
  }

  // Whether all of its kind, stage and lower place have run; tasks that give no unit back may
  // run in any order.
  // Whether another of its kind and stage comes first in the step's order, where that is kept.
  bool must_wait_for_place(const Task& task) const {
    const auto& forwards = s_.options.forward_in_order;
    const auto& inputs = s_.options.input_in_order;
    const bool kept = gives_back(task.kind) ? s_.options.weight_in_order
                      : task.kind == TaskKind::kForward
                          ? !forwards.empty() && forwards[task.stage]
                          : !inputs.empty() && inputs[task.stage];
    if (!kept) return false;
    for (std::size_t p = 0; p < s_.order.size(); ++p) {
      const Task& other = s_.order[p];
      if (other.kind == task.kind && other.stage == task.stage &&
          s_.places[other.microbatch] < s_.places[task.microbatch] &&
          claimed.count(static_cast<std::int32_t>(p)) == 0) {
        return true;
      }
    }
    return false;
  }

  bool admitted(const Task& task, std::int32_t earliest) const {
    if (s_.options.limit_units < 0) return true;
    const std::int32_t free = s_.options.limit_units - held();
    if (s_.options.admission == AdmissionRule::kLevelled) return free >= s_.num_chunks - task.stage;
    return free >= (task.microbatch == earliest ? 1 : s_.num_chunks - held(earliest) + 1);
  }

  // The microbatch of the lowest place that has forwards left; -1: none has.
  std::int32_t earliest() const {
    std::map<std::int32_t, std::int32_t> forwards;
    for (const std::int32_t p : claimed) {
      forwards[s_.order[p].microbatch] += s_.order[p].kind == TaskKind::kForward;
    }
    std::map<std::int32_t, std::int32_t> left;  // by place
    for (std::int32_t m = 0; m < s_.num_microbatches; ++m) {
      if (forwards[m] < s_.num_chunks) left[s_.places[m]] = m;
    }
    return left.empty() ? -1 : left.begin()->second;
  }

  const Setting& s_;
  bool open_ = false;  // a round has run its first half
};

// What must have been claimed before `task` can be ready on this rank.
std::vector<Task> local_needs(const Task& task) {
  if (task.kind == TaskKind::kForward) return {};
  const bool after_input_grad = task.kind == TaskKind::kWeightGrad;
  return {{task.stage, after_input_grad ? TaskKind::kInputGrad : TaskKind::kForward,
           task.microbatch}};
}

Setting draw(std::mt19937_64& random) {
  const auto pick = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  Setting s;
  s.num_chunks = 1 + pick(3);
  s.num_microbatches = pick(50) == 0 ? 20 + pick(60) : 1 + pick(7);
  const int form = pick(5);
  s.kinds = {TaskKind::kForward};
  if (form == 1 || form == 2) s.kinds.push_back(TaskKind::kBackward);
  if (form >= 3) s.kinds = {TaskKind::kForward, TaskKind::kInputGrad, TaskKind::kWeightGrad};
  s.rule = static_cast<HintRule>(pick(7));
  s.options.units_returned = form != 0;
  // A random order in which every task follows its local needs.
  std::vector<Task> waiting;
  for (std::int32_t c = 0; c < s.num_chunks; ++c) {
    for (const TaskKind kind : s.kinds) {
      for (std::int32_t m = 0; m < s.num_microbatches; ++m) waiting.push_back({c, kind, m});
    }
  }
  std::int32_t units = 0, order_peak = 0;
  while (!waiting.empty()) {
    const auto at = waiting.begin() + pick(waiting.size());
    const auto needs = local_needs(*at);
    if (!needs.empty() && std::find(s.order.begin(), s.order.end(), needs[0]) == s.order.end()) {
      continue;
    }
    units += at->kind == TaskKind::kForward ? 1 : gives_back(at->kind) ? -1 : 0;
    order_peak = std::max(order_peak, units);
    s.order.push_back(*at);
    waiting.erase(at);
  }
  s.options.slack = std::vector<std::int32_t>{0, 1, 3, kUnlimited}[pick(4)];
  s.options.weight_in_order = pick(3) == 0;
  if (s.options.weight_in_order) {
    for (std::int32_t c = 0; c < s.num_chunks; ++c) {
      s.options.forward_in_order.push_back(pick(2) == 0);
      s.options.input_in_order.push_back(pick(2) == 0);
    }
  }
  const bool may_be_level = s.options.slack <= 0 && !s.options.weight_in_order;
  s.options.admission =
      may_be_level && pick(2) == 0 ? AdmissionRule::kLevelled : AdmissionRule::kEarliest;
  const std::int32_t least = s.options.slack == 0 ? order_peak : s.num_chunks;
  if (pick(4) != 0) s.options.limit_units = least + pick(s.num_microbatches + 1);
  for (std::int32_t m = 0; m < s.num_microbatches; ++m) s.places.push_back(m);
  std::shuffle(s.places.begin(), s.places.end(), random);
  return s;
}

using Counts = std::map<Blocked, int>;

void compare(std::uint64_t seed, Counts& counts) {
  std::mt19937_64 random(seed);
  const Setting s = draw(random);
  std::vector<std::int32_t> stages;
  for (std::int32_t c = 0; c < s.num_chunks; ++c) stages.push_back(c);
  const TaskTable table(stages, s.kinds, s.num_microbatches);
  const HintOrder order(table, s.rule, s.order);
  Arbiter arbiter(table, order, s.options, s.places);
  Twin twin(s);
  std::vector<std::int32_t> outside;  // positions that have not arrived
  for (std::size_t p = 0; p < s.order.size(); ++p) outside.push_back(static_cast<std::int32_t>(p));
  const auto may_arrive = [&](std::int32_t position) {
    const auto needs = local_needs(s.order[position]);
    return needs.empty() || twin.claimed.count(order.position_of(table.local(needs[0]))) != 0;
  };
  const bool eager = random() % 2 == 0;
  for (bool stuck = false; !stuck && twin.claimed.size() < s.order.size();) {
    if (!outside.empty() && random() % (eager ? 4 : 2) != 0) {
      const auto at = outside.begin() + static_cast<std::ptrdiff_t>(random() % outside.size());
      if (may_arrive(*at)) {
        const auto local = table.local(s.order[*at]);
        twin.ready.insert(*at);
        const bool is_new = arbiter.arrive(local);
        CHECK(is_new && !arbiter.arrive(local));
        outside.erase(at);
      }
    }
    const Choice choice = arbiter.select();
    const Twin::Answer expected = twin.answer();
    const std::int32_t got = choice.local < 0 ? -1 : order.position_of(choice.local);
    if (got != expected.position || choice.blocked != expected.blocked) {
      return test::fail(__FILE__, __LINE__, "another choice at case seed " + std::to_string(seed));
    }
    ++counts[choice.blocked];
    if (got < 0) {
      stuck = std::none_of(outside.begin(), outside.end(), may_arrive);
      continue;
    }
    if (random() % 5 == 0) continue;  // choosing is not claiming
    std::int32_t overtaken = 0;
    for (std::int32_t p = 0; p < got; ++p) overtaken += twin.claimed.count(p) == 0;
    CHECK(choice.overtaken == overtaken);
    arbiter.commit(choice);
    twin.claim(got);
    CHECK(arbiter.units_held() == twin.held() && arbiter.peak_units() == twin.peak);
    CHECK(arbiter.num_claimed() == static_cast<std::int32_t>(twin.claimed.size()));
    CHECK(arbiter.first_unclaimed_position() == twin.first_unclaimed());
  }
  const bool finished = twin.claimed.size() == s.order.size();
  if (finished) ++counts[Blocked::kDone];
  // Chunks arrive here in any order, as in a graph with several sources: the earliest rule must
  // bring every step to its end, the levelled one need not.
  const bool must_finish = s.options.slack == kUnlimited &&
                           s.options.admission == AdmissionRule::kEarliest;
  CHECK(finished || !must_finish);
}

TEST_CASE(random_states_equal_the_twin) {
  Counts counts;
  for (std::uint64_t i = 0; i < 4000; ++i) compare(test::seed() + i, counts);
  for (const Blocked reason :
       {Blocked::kNot, Blocked::kInput, Blocked::kLimit, Blocked::kSlack, Blocked::kDone}) {
    std::printf("  reason %d: %d times\n", static_cast<int>(reason), counts[reason]);
    CHECK(counts[reason] > 500);
  }
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
