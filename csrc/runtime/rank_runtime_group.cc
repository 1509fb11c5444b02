// RankRuntime as a member of an agreement group.
#include <algorithm>
#include <bit>

#include "base/check.hpp"
#include "base/clock.hpp"
#include "runtime/rank_runtime.hpp"

namespace rrfp {

std::unique_ptr<StepAgreement> RankRuntime::make_agreement(const StepPlan& plan,
                                                           std::uint32_t step) {
  if (agreement_ == nullptr) return nullptr;
  const std::int32_t num_tasks = plan.table(rank()).num_tasks();
  RRFP_CHECK(num_tasks <= kMaxAgreementTasks,
             "the step has " + std::to_string(num_tasks) + " tasks on rank " +
                 std::to_string(rank()) + "; an agreement group decides on at most " +
                 std::to_string(kMaxAgreementTasks) + ". Use fewer microbatches");
  const AgreementWords<std::atomic> words{agreement_->words(step, 0), agreement_->words(step, 1),
                                          agreement_->words(step, 2)};
  return std::make_unique<GroupMember>(words, num_tasks, agreement_->member(),
                                       agreement_->num_members(), step, &agreement_->bell());
}

std::uint32_t RankRuntime::prepare_claim() const {
  return agreement_ != nullptr ? agreement_->bell().prepare() : wake_.prepare();
}

// False: the run has just been ended, here or by another member.
bool RankRuntime::can_go_on(const Choice& choice) {
  if (const auto trouble = agreement_->trouble()) {
    abort(*trouble);
    return false;
  }
  if (choice.blocked != Blocked::kNot) return true;
  abort({StatusCode::kProtocol, rank(),
         "the agreement group of rank " + std::to_string(rank()) + " has decided on a task that "
             "cannot run here, in step " + std::to_string(step_->number) +
             ": its members do not run the same step. Call the pipeline with the same options on "
             "every member"});
  return false;
}

std::string RankRuntime::members_text() const {
  std::string text = "The agreement group of rank " + std::to_string(rank()) + " has";
  for (std::int32_t m = 0; m < agreement_->num_members(); ++m) {
    text += std::string(m == 0 ? "" : ",") + " member " + std::to_string(m) + " (" +
            agreement_->name(m) + ")";
  }
  return text;
}

// A rank whose group is inside a task is not stalled: it waits for a member that is busy.
RankState RankRuntime::own_state(std::int64_t now_ns) const {
  RankState state = board_.read(now_ns);
  if (agreement_ != nullptr && state.activity == Activity::kWaiting &&
      agreement_->is_other_inside()) {
    state.activity = Activity::kRunning;
    state.stage = -1;
  }
  return state;
}

void RankRuntime::check_members(const Step* step, std::int64_t now_ns) {
  auto trouble = agreement_->trouble();
  if (!trouble) trouble = agreement_->watch(now_ns, options_.peer_timeout_ms);
  if (trouble) return abort(*trouble);
  // relaxed: late by one tick either way.
  if (step == nullptr || step->is_over.load(std::memory_order_relaxed)) return;
  for (std::int32_t m = 0; m < agreement_->num_members(); ++m) {
    if (m == agreement_->member() || !agreement_->has_closed(m) ||
        !step->engine.needs_members(std::uint32_t{1} << m)) {
      continue;
    }
    return abort({StatusCode::kClosed, -1,
                  agreement_->name(m) + ", a member of the agreement group of rank " +
                      std::to_string(rank()) + ", has closed its pipeline, while this rank is in "
                      "step " + std::to_string(step->number) + " and still needs it. Call every "
                      "member the same number of times"});
  }
}

std::vector<std::vector<std::byte>> RankRuntime::exchange_cards(
    const std::vector<std::byte>& card, std::int64_t timeout_ms) {
  RRFP_INVARIANT(agreement_ != nullptr, "cards are exchanged in an agreement group only");
  join_progress_thread();
  if (board_.activity() != Activity::kEntering) board_.set(Activity::kEntering, now());
  if (!card.empty()) agreement_->post(card);
  const std::int64_t until_ns = now() + timeout_ms * kNsPerMs;
  while (true) {
    const std::uint32_t ticket = prepare_claim();
    if (const auto trouble = agreement_->trouble()) abort(*trouble);
    if (is_aborted()) return {};
    if (auto cards = agreement_->collect()) return *cards;
    for (std::uint32_t owing = agreement_->owing(); owing != 0; owing &= owing - 1) {
      const std::int32_t member = std::countr_zero(owing);
      if (!agreement_->has_closed(member)) continue;
      abort({StatusCode::kClosed, -1,
             agreement_->name(member) + ", a member of the agreement group of rank " +
                 std::to_string(rank()) + ", has closed its pipeline, while this rank waits for "
                 "its word on the coming step. Call every member the same number of times"});
      return {};
    }
    const std::int64_t left_ns = until_ns - now();
    if (left_ns <= 0) return {};
    agreement_->bell().wait(ticket, left_ns);
  }
}

std::vector<std::string> RankRuntime::owing_members() const {
  std::vector<std::string> names;
  for (std::uint32_t owing = agreement_ != nullptr ? agreement_->owing() : 0; owing != 0;
       owing &= owing - 1) {
    names.push_back(agreement_->name(std::countr_zero(owing)));
  }
  return names;
}

std::uint64_t RankRuntime::agreement_digest() const {
  const bool has_log = step_ != nullptr && step_->engine.agreement() != nullptr;
  return has_log ? step_->engine.agreement()->digest() : 0;
}

}  // namespace rrfp
