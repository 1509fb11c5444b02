// Arbiter against a brute-force twin on random states: every rule, slack, limit and admission
// rule, limits in units and bytes, 1-3 chunks, split, unsplit and forward-only.
#include <algorithm>
#include <map>
#include <random>

#include "arbiter/arbiter.hpp"
#include "check.hpp"
#include "unit/arbiter_twin.hpp"

namespace rrfp::test {
namespace {

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
  const bool in_bytes = s.options.admission == AdmissionRule::kEarliest && s.options.slack != 0 &&
                        s.options.units_returned && pick(2) == 0;
  for (std::int32_t i = 0; in_bytes && i < s.num_chunks * s.num_microbatches; ++i) {
    s.options.forward_bytes.push_back(pick(9));
  }
  if (in_bytes) s.options.limit_bytes = pick(8 * s.num_chunks * s.num_microbatches);
  if (!in_bytes && pick(4) != 0) s.options.limit_units = least + pick(s.num_microbatches + 1);
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
      return fail(__FILE__, __LINE__, "another choice at case seed " + std::to_string(seed));
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
  for (std::uint64_t i = 0; i < 4000; ++i) compare(seed() + i, counts);
  for (const Blocked reason :
       {Blocked::kNot, Blocked::kInput, Blocked::kLimit, Blocked::kSlack, Blocked::kDone}) {
    std::printf("  reason %d: %d times\n", static_cast<int>(reason), counts[reason]);
    CHECK(counts[reason] > 500);
  }
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
