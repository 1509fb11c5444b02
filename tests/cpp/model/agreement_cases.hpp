// The small cases in which AgreementLog is explored, for itself and for its mutants.
//
// Members let tasks arrive in orders of their own, look, propose what they like best and adopt
// what won. In every interleaving, with members stalling anywhere and one dying anywhere:
//   agreed    no two members take over a different decision k
//   complete  a task is decided only after it has arrived at every member
//   once      no task is decided twice
//   progress  while all live, every task is decided, in one order, when all have looked enough
//   steps     what an earlier step has left in the words counts for nothing
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "arbiter/agreement_log.hpp"
#include "model/model_atomic.hpp"

namespace rrfp::test {

struct AgreementCase {
  const char* name;
  std::int32_t num_tasks;
  std::vector<std::vector<std::int32_t>> arrivals;  // by member, in its order
  int num_looks;                                    // of each member, after each arrival
  std::uint32_t used_in_step = UINT32_MAX;          // an earlier step that has filled the words
};

inline std::vector<AgreementCase> agreement_cases() {
  return {
      {"one task, two members", 1, {{0}, {0}}, 1},
      {"two tasks in one order", 2, {{0, 1}, {0, 1}}, 1},
      {"two tasks crosswise", 2, {{0, 1}, {1, 0}}, 1},
      {"two tasks crosswise, words used before", 2, {{0, 1}, {1, 0}}, 1, 3},
      {"one task, three members", 1, {{0}, {0}, {0}}, 1},
  };
}

constexpr std::uint32_t kModelStep = 5;

template <class Steps>
struct AgreementRun {
  using Log = AgreementLog<ModelAtomic, Steps>;

  explicit AgreementRun(const AgreementCase& of)
      : of_(of),
        words(3 * of.num_tasks),
        members(of.arrivals.size()),
        has_arrived(of.num_tasks, std::vector<bool>(of.arrivals.size(), false)) {
    const AgreementWords<ModelAtomic> arrays{words.data(), words.data() + of.num_tasks,
                                             words.data() + 2 * of.num_tasks};
    if (of.used_in_step != UINT32_MAX) {
      for (ModelAtomic<AgreementWord>& word : words) {
        word.store(Steps::make(of.used_in_step, 1), std::memory_order_relaxed);
      }
    }
    for (std::size_t m = 0; m < members.size(); ++m) {
      members[m].log = std::make_unique<Log>(arrays, of.num_tasks, static_cast<std::int32_t>(m),
                                             static_cast<std::int32_t>(members.size()),
                                             kModelStep);
    }
  }

  void live(std::size_t m) {
    for (const std::int32_t task : of_.arrivals[m]) {
      has_arrived[task][m] = true;
      members[m].log->arrive(task);
      for (int look = 0; look < of_.num_looks; ++look) this->look(m);
    }
  }

  // As GroupMember::claim(): adopts, or proposes the seen task it likes best.
  bool look(std::size_t m) {
    Member& member = members[m];
    std::int32_t decided = member.log->adopted();
    for (std::int32_t task; (task = member.log->next_ready()) >= 0;) member.seen.push_back(task);
    if (decided < 0) {
      if (member.seen.empty()) return false;
      // Even members prefer low tasks, odd ones high: whoever looks first matters.
      const auto best = m % 2 == 0 ? std::min_element(member.seen.begin(), member.seen.end())
                                   : std::max_element(member.seen.begin(), member.seen.end());
      decided = member.log->propose(*best);
      for (std::int32_t task; (task = member.log->next_ready()) >= 0;) member.seen.push_back(task);
    }
    take(m, decided);
    return true;
  }

  void take(std::size_t m, std::int32_t task) {
    Explorer& explorer = *Explorer::current();
    Member& member = members[m];
    explorer.check(task >= 0 && task < of_.num_tasks, "complete: a decision is no task");
    if (task < 0 || task >= of_.num_tasks) return;
    const auto seen = std::find(member.seen.begin(), member.seen.end(), task);
    explorer.check(seen != member.seen.end(), "once: a decision is not ready here");
    if (seen != member.seen.end()) member.seen.erase(seen);
    for (const bool has : has_arrived[task]) {
      explorer.check(has, "complete: a task was decided before it had arrived everywhere");
    }
    const std::size_t k = member.taken.size();
    for (const Member& other : members) {
      explorer.check(other.taken.size() <= k || other.taken[k] == task,
                     "agreed: two members took over different decisions");
    }
    member.taken.push_back(task);
  }

  void finish(bool all_live) {
    Explorer& explorer = *Explorer::current();
    if (!all_live) return;
    for (std::size_t round = 0; round < 2 * words.size(); ++round) {
      for (std::size_t m = 0; m < members.size(); ++m) {
        if (members[m].taken.size() < static_cast<std::size_t>(of_.num_tasks)) look(m);
      }
    }
    for (const Member& member : members) {
      explorer.check(member.taken.size() == static_cast<std::size_t>(of_.num_tasks),
                     "progress: a task was never decided");
    }
  }

  struct Member {
    std::unique_ptr<Log> log;
    std::vector<std::int32_t> seen;   // of the ready log, not yet decided
    std::vector<std::int32_t> taken;  // decisions taken over
  };

  const AgreementCase& of_;
  std::vector<ModelAtomic<AgreementWord>> words;
  std::vector<Member> members;
  std::vector<std::vector<bool>> has_arrived;  // by task and member
};

// `dying` dies at its dies_at-th access; SIZE_MAX: all live.
template <class Steps>
Exploration explore_agreement(const AgreementCase& of, std::size_t dying = SIZE_MAX,
                              std::uint64_t dies_at = 0) {
  return Explorer::explore([&of, dying, dies_at] {
    auto run = std::make_shared<AgreementRun<Steps>>(of);
    Program program;
    for (std::size_t m = 0; m < of.arrivals.size(); ++m) {
      program.bodies.push_back([run, m] { run->live(m); });
    }
    program.afterwards = [run, dying] { run->finish(dying == SIZE_MAX); };
    program.dying = dying;
    program.dies_at = dies_at;
    return program;
  });
}

}  // namespace rrfp::test
