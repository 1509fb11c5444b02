// StepAgreement: what the engine of a step asks of an agreement group. GroupMember answers from
// an AgreementLog; the simulated world has members of its own that look, think and publish at
// different moments.
//
// What a member runs is a function of the group's decisions alone: units move, positions are
// claimed and rounds turn when a decision is taken over, in the order of the log. When a member
// looks, and what it sees then, only decides what it may propose.
#pragma once

#include <atomic>
#include <cstdint>

#include "arbiter/agreement_log.hpp"
#include "arbiter/arbiter.hpp"
#include "base/event_count.hpp"

namespace rrfp {

class StepAgreement {
 public:
  virtual ~StepAgreement() = default;

  // Any thread: all inputs of the task are at this member. True: it can run now, at all of them.
  virtual bool arrive(std::int32_t local) = 0;

  // The worker: the next task of the group, not yet committed, or why there is none. Neither a
  // task nor a reason (Blocked::kNot): the group has decided on what cannot run here, so the
  // members disagree about the step.
  virtual Choice claim(Arbiter& arbiter) = 0;

  // Any thread: members at which the task has not arrived, one bit each.
  virtual std::uint32_t absentees(std::int32_t local) const = 0;

  // The worker: a number that two members share if they have taken over the same decisions.
  virtual std::uint64_t digest() const = 0;
};

// Threads  arrive(), absentees(): any. The rest: the worker.
// Progress lock-free. Who completes a task or makes a decision rings the group's bell; who has
//          found nothing since its prepare() may sleep on it.
// Lifetime the words and the bell outlive it. `bell` may be null: nobody sleeps.
class GroupMember final : public StepAgreement {
 public:
  GroupMember(const AgreementWords<std::atomic>& words, std::int32_t num_tasks,
              std::int32_t member, std::int32_t num_members, std::uint32_t step,
              SharedEventCount* bell)
      : log_(words, num_tasks, member, num_members, step), bell_(bell) {}

  bool arrive(std::int32_t local) override {
    num_arrived_.fetch_add(1, std::memory_order_relaxed);  // only says what a wait is booked under
    if (!log_.arrive(local)) return false;
    ring();
    return true;
  }

  Choice claim(Arbiter& arbiter) override {
    const std::int32_t decided = log_.adopted();
    feed(arbiter);  // after the look at the decision: L3 brings what its proposer saw
    if (decided >= 0) return take_over(arbiter, decided);
    Choice choice = arbiter.select();
    if (choice.local < 0) {
      if (choice.blocked == Blocked::kInput &&
          num_arrived_.load(std::memory_order_relaxed) > log_.num_read()) {  // only for reports
        choice.blocked = Blocked::kAgreement;
      }
      return choice;
    }
    const std::int32_t winner = log_.propose(choice.local);
    if (winner == choice.local) {
      ring();
      digest_ = mixed(digest_, winner);
      return choice;
    }
    feed(arbiter);
    return take_over(arbiter, winner);
  }

  std::uint32_t absentees(std::int32_t local) const override { return log_.absentees(local); }
  std::uint64_t digest() const override { return digest_; }

 private:
  void feed(Arbiter& arbiter) {
    for (std::int32_t local; (local = log_.next_ready()) >= 0;) arbiter.arrive(local);
  }

  Choice take_over(const Arbiter& arbiter, std::int32_t local) {
    digest_ = mixed(digest_, local);
    return arbiter.choice_of(local);
  }

  void ring() {
    if (bell_ != nullptr) bell_->notify();
  }

  static std::uint64_t mixed(std::uint64_t digest, std::int32_t local) {
    return (digest ^ static_cast<std::uint64_t>(local + 1)) * 0x100000001b3ULL;
  }

  AgreementLog<> log_;
  SharedEventCount* bell_;
  std::atomic<std::int32_t> num_arrived_{0};
  std::uint64_t digest_ = 0xcbf29ce484222325ULL;
};

}  // namespace rrfp
