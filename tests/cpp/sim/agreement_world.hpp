// AgreementWorld: several pipelines side by side on a virtual clock; the ranks of one place form
// an agreement group. Every task holds a collective of its group: it ends when all members are
// inside it, so members that run different tasks wait for each other for ever.
//
// Messages of the pipelines come at seeded moments of their own, one member may be late always,
// and a member thinks for a while between its look and its proposal. The words hold what an
// earlier step has left. In every fourth step a process dies at some moment: what is left of the
// step then waits for it, but nobody may have run another order.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "random_step.hpp"
#include "runtime/step_engine.hpp"

namespace rrfp::test {

// As GroupMember, but time passes between its look and its proposal.
template <class Steps = AgreementSteps<std::atomic>>
class ThinkingMember : public StepAgreement {
 public:
  ThinkingMember(const AgreementWords<std::atomic>& words, std::int32_t num_tasks,
                 std::int32_t member, std::int32_t num_members, std::uint32_t step)
      : log_(words, num_tasks, member, num_members, step) {}

  bool arrive(std::int32_t local) override { return log_.arrive(local); }
  Choice claim(Arbiter& arbiter) override {
    if (thought_ >= 0) return settle(arbiter, log_.propose(std::exchange(thought_, -1)));
    const std::int32_t decided = log_.adopted();
    if (decided >= 0) return settle(arbiter, decided);
    feed(arbiter);
    const Choice choice = arbiter.select();
    thought_ = choice.local;
    return {-1, choice.local >= 0 ? Blocked::kAgreement : choice.blocked};
  }
  std::uint32_t absentees(std::int32_t local) const override { return log_.absentees(local); }
  std::uint64_t digest() const override { return 0; }

 private:
  void feed(Arbiter& arbiter) {
    for (std::int32_t local; (local = log_.next_ready()) >= 0;) arbiter.arrive(local);
  }
  Choice settle(Arbiter& arbiter, std::int32_t local) {
    feed(arbiter);
    return arbiter.choice_of(local);
  }

  AgreementLog<std::atomic, Steps> log_;
  std::int32_t thought_ = -1;
};

struct AgreementOutcome {
  bool finished = false;
  bool has_death = false;
  std::string wrong;                                // the first thing that is, in words
  std::vector<std::vector<std::vector<Task>>> ran;  // by member and rank
};

template <class Member>
class AgreementWorld {
 public:
  AgreementWorld(const RandomStep& step, std::int32_t num_members, std::uint64_t seed)
      : step_(step), num_members_(num_members), random_(seed), late_member_(pick(num_members)) {
    StepOptions options = step.options();
    options.waiting = false;
    plan_ = step.plan_with(options);
    is_skewed_ = pick(3) != 0;
    outcome_.ran.resize(num_members);
    for (std::int32_t rank = 0; rank < step.num_ranks(); ++rank) {
      const std::int32_t num_tasks = plan_->table(rank).num_tasks();
      words_.push_back(std::make_unique<std::vector<std::atomic<AgreementWord>>>(3 * num_tasks));
      for (std::int32_t w = 0; w < 3 * num_tasks; ++w) {
        (*words_.back())[w] = AgreementSteps<std::atomic>::make(kStep - 2, 1 + w % num_tasks);
      }
      inside_.emplace_back(num_tasks, 0);
    }
    for (std::int32_t m = 0; m < num_members; ++m) {
      outcome_.ran[m].resize(step.num_ranks());
      for (std::int32_t rank = 0; rank < step.num_ranks(); ++rank) add_engine(m, rank);
    }
  }

  AgreementOutcome run() {
    for (std::int32_t m = 0; m < num_members_; ++m) {
      for (std::int32_t rank = 0; rank < step_.num_ranks(); ++rank) look_later(m, rank, 0);
    }
    if (pick(4) == 0) {
      outcome_.has_death = true;
      const std::size_t dying = at(pick(num_members_), pick(step_.num_ranks()));
      push(pick(kLongestLife_ns), [this, dying](std::int64_t) { is_dead_[dying] = true; });
    }
    while (!events_.empty() && outcome_.wrong.empty()) {
      const Event event = events_.top();
      events_.pop();
      event.apply(event.at_ns);
    }
    outcome_.finished = outcome_.wrong.empty();
    for (const auto& engine : engines_) outcome_.finished &= engine->finished();
    return std::move(outcome_);
  }

 private:
  struct Event {
    std::int64_t at_ns;
    std::int64_t number;
    std::function<void(std::int64_t)> apply;
    bool operator<(const Event& other) const {
      return at_ns != other.at_ns ? at_ns > other.at_ns : number > other.number;
    }
  };

  std::int64_t pick(std::int64_t below) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(below));
  }

  void add_engine(std::int32_t m, std::int32_t rank) {
    auto& words = *words_[rank];
    const std::int32_t num_tasks = plan_->table(rank).num_tasks();
    const AgreementWords<std::atomic> arrays{words.data(), words.data() + num_tasks,
                                             words.data() + 2 * num_tasks};
    engines_.push_back(std::make_unique<StepEngine>(
        plan_, rank, nullptr,
        std::make_unique<Member>(arrays, num_tasks, m, num_members_, kStep)));
    is_busy_.push_back(false);
    is_dead_.push_back(false);
  }

  std::size_t at(std::int32_t m, std::int32_t rank) const {
    return static_cast<std::size_t>(m) * step_.num_ranks() + rank;
  }

  void push(std::int64_t at_ns, std::function<void(std::int64_t)> apply) {
    events_.push({at_ns, num_events_++, std::move(apply)});
  }

  void look_later(std::int32_t m, std::int32_t rank, std::int64_t now_ns) {
    push(now_ns + pick(is_skewed_ ? 500 : 3),
         [this, m, rank](std::int64_t at_ns) { look(m, rank, at_ns); });
  }

  void look_everywhere(std::int32_t rank, std::int64_t now_ns) {  // the bell
    for (std::int32_t m = 0; m < num_members_; ++m) look_later(m, rank, now_ns);
  }

  void look(std::int32_t m, std::int32_t rank, std::int64_t now_ns) {
    if (is_busy_[at(m, rank)] || is_dead_[at(m, rank)]) return;
    const Choice choice = engines_[at(m, rank)]->claim(now_ns);
    if (choice.local >= 0) {
      start(m, rank, choice.local, now_ns);
      look_everywhere(rank, now_ns);
    } else if (choice.blocked == Blocked::kAgreement) {
      look_later(m, rank, now_ns);
    } else if (choice.blocked == Blocked::kNot) {
      outcome_.wrong = "a member cannot run what the group has decided";
    }
  }

  void start(std::int32_t m, std::int32_t rank, std::int32_t local, std::int64_t now_ns) {
    const Task task = plan_->table(rank).task(local);
    is_busy_[at(m, rank)] = true;
    outcome_.ran[m][rank].push_back(task);
    if (++inside_[rank][local] < num_members_) return;  // the collective waits for the others
    const std::int64_t end_ns = now_ns + step_.duration_ns(task);
    for (std::int32_t member = 0; member < num_members_; ++member) {
      push(end_ns + pick(50), [this, member, rank, local](std::int64_t at_ns) {
        retire(member, rank, local, at_ns);
      });
    }
  }

  void retire(std::int32_t m, std::int32_t rank, std::int32_t local, std::int64_t now_ns) {
    if (is_dead_[at(m, rank)]) return;
    const Task task = plan_->table(rank).task(local);
    is_busy_[at(m, rank)] = false;
    engines_[at(m, rank)]->retire(local, now_ns);
    for (const std::int32_t stage : plan_->graph().targets_of(task)) {
      std::int64_t lag_ns = step_.latency_ns(task);
      if (is_skewed_) lag_ns += pick(2000) + (m == late_member_ ? 3000 : 0);
      const std::int32_t target_rank = plan_->graph().rank_of(stage);
      push(now_ns + lag_ns, [=, this](std::int64_t at_ns) {
        if (is_dead_[at(m, target_rank)]) return;
        engines_[at(m, target_rank)]->deliver({stage, task.kind, task.microbatch}, task.stage,
                                              nullptr, at_ns);
        look_everywhere(target_rank, at_ns);
      });
    }
    look_everywhere(rank, now_ns);
  }

  static constexpr std::uint32_t kStep = 7;
  static constexpr std::int64_t kLongestLife_ns = 300000;  // some steps are over by then
  const RandomStep& step_;
  const std::int32_t num_members_;
  std::mt19937_64 random_;
  const std::int64_t late_member_;
  bool is_skewed_ = true;
  std::shared_ptr<const StepPlan> plan_;
  std::vector<std::unique_ptr<std::vector<std::atomic<AgreementWord>>>> words_;  // by rank
  std::vector<std::unique_ptr<StepEngine>> engines_;                             // by member, rank
  std::vector<bool> is_busy_;                                                    // the same
  std::vector<bool> is_dead_;                                                    // the same
  std::vector<std::vector<std::int32_t>> inside_;  // by rank and local: members that began it
  std::priority_queue<Event> events_;
  std::int64_t num_events_ = 0;
  AgreementOutcome outcome_;
};

// Empty: every member ran every task, all of a group in one order, within the limits; after a
// death, each as much of one order as it came to.
inline std::string verdict(const RandomStep& step, const AgreementOutcome& outcome) {
  if (!outcome.wrong.empty()) return outcome.wrong;
  if (!outcome.finished && !outcome.has_death) return "the step did not finish";
  for (std::int32_t rank = 0; rank < step.num_ranks(); ++rank) {
    const std::vector<Task>* longest = &outcome.ran[0][rank];
    for (const auto& ran : outcome.ran) {
      if (ran[rank].size() > longest->size()) longest = &ran[rank];
    }
    for (const auto& ran : outcome.ran) {
      if (!std::equal(ran[rank].begin(), ran[rank].end(), longest->begin())) {
        return "two members ran different orders";
      }
    }
    std::vector<int> times(step.num_tasks(), 0);
    for (const Task& task : *longest) {
      if (++times[step.index(task)] > 1) return to_text(task) + " ran twice";
    }
  }
  return "";
}

}  // namespace rrfp::test
