#include "runtime/step_engine.hpp"

#include <algorithm>
#include <bit>

#include "base/check.hpp"
#include "base/prefetch.hpp"

namespace rrfp {

namespace {

std::vector<std::int32_t> places_of(const std::vector<std::int32_t>& microbatch_order) {
  std::vector<std::int32_t> place(microbatch_order.size());
  for (std::size_t at = 0; at < microbatch_order.size(); ++at) {
    place[microbatch_order[at]] = static_cast<std::int32_t>(at);
  }
  return place;
}

// Waiting goes by this rank's own clock, of which the other members know nothing.
ArbiterOptions options_for(const StepPlan& plan, std::int32_t rank, bool in_group) {
  ArbiterOptions options = plan.arbiter_options(rank);
  if (!in_group) return options;
  options.forward_patience = options.weight_patience = 0;
  options.rounds_by_claims = true;
  return options;
}

}  // namespace

StepEngine::StepEngine(std::shared_ptr<const StepPlan> plan, std::int32_t rank, TaskTimes* times,
                       std::unique_ptr<StepAgreement> agreement,
                       std::pmr::memory_resource* memory)
    : StepEngine(plan, rank, times, options_for(*plan, rank, agreement != nullptr),
                 std::move(agreement), memory) {}

StepEngine::StepEngine(std::shared_ptr<const StepPlan> plan, std::int32_t rank, TaskTimes* times,
                       const ArbiterOptions& options, std::unique_ptr<StepAgreement>&& agreement,
                       std::pmr::memory_resource* memory)
    : plan_(std::move(plan)),
      rank_(rank),
      own_times_(times ? std::nullopt
                       : std::optional<TaskTimes>(std::in_place, table().num_chunks(), memory)),
      times_(times ? *times : *own_times_),
      agreement_(std::move(agreement)),
      arbiter_(plan_->table(rank), plan_->hint_order(rank), options,
               places_of(plan_->microbatch_order()), &times_, memory),
      tasks_(table().num_tasks(), memory),
      inputs_(memory) {
  std::int32_t num_inputs = 0;
  for (std::int32_t local = 0; local < table().num_tasks(); ++local) {
    TaskState& state = tasks_[local];
    const Task task = table().task(local);
    state.first_input = num_inputs;
    state.num_inputs =
        static_cast<std::int16_t>(own_bits(task.kind) + senders_of(task).size());
    if (state.num_inputs == 0) arrive(local);
    num_inputs += state.num_inputs;
  }
  inputs_.resize(num_inputs);
}

const std::vector<std::int32_t>& StepEngine::senders_of(const Task& task) const {
  switch (task.kind) {
    case TaskKind::kForward: return plan_->graph().sources_of(task.stage);
    case TaskKind::kBackward:
    case TaskKind::kInputGrad: return plan_->graph().consumers_of(task.stage);
    case TaskKind::kWeightGrad: break;
  }
  return none_;
}

std::pair<std::int32_t, std::int32_t> StepEngine::input_of(const Task& target,
                                                           std::int32_t source_stage) const {
  const std::int32_t local = table().local(target);
  if (local < 0) return {-1, -1};
  const auto& senders = senders_of(target);
  const auto sender = std::find(senders.begin(), senders.end(), source_stage);
  if (sender == senders.end()) return {-1, -1};
  return {local, own_bits(target.kind) + static_cast<std::int32_t>(sender - senders.begin())};
}

Delivery StepEngine::deliver(const Task& target, std::int32_t source_stage, void* payload,
                             std::int64_t now_ns, std::int64_t computed_ns) {
  const auto [local, bit] = input_of(target, source_stage);
  if (local < 0) return Delivery::kUnknown;
  return computed_ns > 0 ? set_bit(local, bit, {payload, computed_ns}, source_stage, now_ns)
                         : set_bit(local, bit, {payload, now_ns}, -1, now_ns);
}

bool StepEngine::announce(const Task& target, std::int32_t source_stage, std::int64_t expected_ns,
                          std::int64_t now_ns) {
  if (!plan_->waits()) return false;  // also: on a chain a task has one sender
  const std::int32_t local = input_of(target, source_stage).first;
  return local >= 0 && arbiter_.announce({local, now_ns, expected_ns});
}

std::int64_t StepEngine::usual_duration_ns(std::int32_t local) const {
  return times_.duration_ns(table().task(local).kind, chunk_of(local));
}

void StepEngine::learn_travel(std::int32_t local, std::int64_t took_ns) {
  const Announcement* announcement = arbiter_.announcement_of(local);
  if (announcement == nullptr) return;
  times_.add_travel(table().task(local).kind, chunk_of(local),
                    tasks_[local].record.ready_ns - announcement->received_ns - took_ns);
}

Delivery StepEngine::set_bit(std::int32_t local, std::int32_t bit, const Input& input,
                             std::int32_t source, std::int64_t now_ns) {
  TaskState& state = tasks_[local];
  const std::uint64_t mask = std::uint64_t{1} << bit;
  if (state.arrived.load(std::memory_order_relaxed) & mask) return Delivery::kDuplicate;  // S2
  inputs_[state.first_input + bit] = input;
  const std::uint64_t before = state.arrived.fetch_or(mask, std::memory_order_acq_rel);  // S1
  RRFP_INVARIANT((before & mask) == 0, "two threads delivered one input of " +
                                           to_text(table().task(local)) + " at once");
  if ((before | mask) != state.wanted()) return Delivery::kWaiting;
  std::int64_t computed_ns = inputs_[state.first_input].computed_ns;
  for (std::int32_t i = 1; i < state.num_inputs; ++i) {
    computed_ns = std::max(computed_ns, inputs_[state.first_input + i].computed_ns);
  }
  state.record.ready_ns = now_ns;
  state.record.computed_ns = computed_ns;
  state.record.last_source = source;
  return arrive(local) ? Delivery::kReady : Delivery::kWaiting;
}

bool StepEngine::arrive(std::int32_t local) {
  if (agreement_ != nullptr) return agreement_->arrive(local);
  RRFP_INVARIANT(arbiter_.arrive(local), to_text(table().task(local)) + " arrived twice");
  return true;
}

Choice StepEngine::claim(std::int64_t now_ns) {
  const Choice choice =
      agreement_ != nullptr ? agreement_->claim(arbiter_) : arbiter_.select(now_ns);
  if (choice.local < 0) return choice;
  passed_ = {};
  if (choice.overtaken > 0) note_passed();
  arbiter_.commit(choice);
  TaskState& state = tasks_[choice.local];
  state.is_claimed = true;
  state.record.claimed_ns = now_ns;
  state.record.overtaken = choice.overtaken;
  return choice;
}

// Before the commit, which may give back the units that held the first task of the hint.
void StepEngine::note_passed() {
  const std::int32_t local = plan_->hint_order(rank_).local_at(arbiter_.first_unclaimed_position());
  const Missing missing = missing_of(local);
  passed_.passed_stage = missing.task.stage;
  passed_.passed_kind = missing.task.kind;
  passed_.passed_microbatch = missing.task.microbatch;
  passed_.lacks_stage = missing.source_stage;
  if (!has_all_inputs(local)) {
    passed_.passed_why = Blocked::kInput;
  } else if (agreement_ != nullptr && agreement_->absentees(local) != 0) {
    passed_.passed_why = Blocked::kAgreement;
  } else if (missing.task.kind == TaskKind::kForward && !arbiter_.admits(local)) {
    passed_.passed_why = Blocked::kLimit;
  }
}

Decision StepEngine::decision(const Choice& choice, std::int64_t now_ns) const {
  Decision decision = passed_;
  const Task task = table().task(choice.local);
  decision.at_ns = now_ns;
  decision.stage = task.stage;
  decision.kind = task.kind;
  decision.microbatch = task.microbatch;
  decision.overtaken = choice.overtaken;
  return decision;
}

std::vector<void*> StepEngine::take_inputs(std::int32_t local) {
  const TaskState& state = tasks_.at(local);
  RRFP_INVARIANT(state.is_claimed,
                 "inputs of " + to_text(table().task(local)) + " taken before its claim");
  std::vector<void*> payloads;
  for (std::int32_t i = 0; i < state.num_inputs; ++i) {
    payloads.push_back(std::exchange(inputs_[state.first_input + i].payload, nullptr));
  }
  return payloads;
}

void StepEngine::retire(std::int32_t local, std::int64_t now_ns) {
  TaskState& state = tasks_.at(local);
  const Task task = table().task(local);
  RRFP_INVARIANT(state.is_claimed, to_text(task) + " was retired but never claimed");
  RRFP_INVARIANT(!state.is_retired, to_text(task) + " was retired twice");
  state.is_retired = true;
  state.record.retired_ns = now_ns;
  times_.add_duration(task.kind, chunk_of(local), now_ns - state.record.claimed_ns);
  ++num_retired_;
  release_dependents(task, now_ns);
}

// The "own F" and "own I" bits; kinds that this step does not have are not in the table.
void StepEngine::release_dependents(const Task& task, std::int64_t now_ns) {
  const auto release = [&](TaskKind kind) {
    const std::int32_t local = table().local({task.stage, kind, task.microbatch});
    if (local >= 0) set_bit(local, 0, {nullptr, now_ns}, -1, now_ns);
  };
  if (task.kind == TaskKind::kForward) {
    release(TaskKind::kBackward);
    release(TaskKind::kInputGrad);
  } else if (task.kind == TaskKind::kInputGrad) {
    release(TaskKind::kWeightGrad);
  }
}

void StepEngine::prefetch(const Task& task) const {
  const std::int32_t local = table().local(task);
  rrfp::prefetch(&tasks_[local]);
  arbiter_.prefetch(local);
  times_.prefetch(task.kind);
  const std::int32_t backward = table().local({task.stage, TaskKind::kBackward, task.microbatch});
  if (task.kind == TaskKind::kForward && backward >= 0) rrfp::prefetch(&tasks_[backward]);
}

void StepEngine::prefetch_further(const Task& task) const {
  const std::int32_t local = table().local(task);
  rrfp::prefetch(&inputs_[tasks_[local].first_input]);
  arbiter_.prefetch_further(local);
  const std::int32_t backward = table().local({task.stage, TaskKind::kBackward, task.microbatch});
  if (task.kind == TaskKind::kForward && backward >= 0) {
    rrfp::prefetch(&inputs_[tasks_[backward].first_input]);
  }
  for (std::int32_t task_class = 0; task_class < table().num_classes(); ++task_class) {
    const std::int32_t next = arbiter_.prefetch_next(task_class);
    if (next >= 0) rrfp::prefetch(&tasks_[next]);
  }
}

StepEngine::Missing StepEngine::missing_of(std::int32_t local) const {
  const Task task = table().task(local);
  const auto& senders = senders_of(task);
  const std::uint64_t arrived = tasks_[local].arrived.load(std::memory_order_relaxed);  // S3
  for (std::size_t i = 0; i < senders.size(); ++i) {
    if (!(arrived >> (own_bits(task.kind) + i) & 1)) return {task, senders[i]};
  }
  return {task, -1};
}

std::vector<StepEngine::Missing> StepEngine::missing(std::size_t at_most) const {
  std::vector<Missing> missing;
  const HintOrder& order = plan_->hint_order(rank_);
  for (std::int32_t at = arbiter_.first_unclaimed_position();
       at < order.num_tasks() && missing.size() < at_most; ++at) {
    const std::int32_t local = order.local_at(at);
    if (!tasks_[local].is_claimed) missing.push_back(missing_of(local));
  }
  return missing;
}

StepEngine::Absent StepEngine::absent() const {
  if (agreement_ == nullptr) return {};
  const HintOrder& order = plan_->hint_order(rank_);
  for (std::int32_t at = arbiter_.first_unclaimed_position(); at < order.num_tasks(); ++at) {
    const std::int32_t local = order.local_at(at);
    if (tasks_[local].is_claimed || !has_all_inputs(local)) continue;
    const std::uint32_t members = agreement_->absentees(local);
    if (members != 0) return {table().task(local), std::countr_zero(members)};
  }
  return {};
}

bool StepEngine::needs(std::int32_t other_rank) const {
  for (std::int32_t local = 0; local < table().num_tasks(); ++local) {
    const Task task = table().task(local);
    const auto& senders = senders_of(task);
    const std::uint64_t arrived = tasks_[local].arrived.load(std::memory_order_relaxed);  // S3
    for (std::size_t i = 0; i < senders.size(); ++i) {
      const bool has_come = arrived >> (own_bits(task.kind) + i) & 1;
      if (!has_come && plan_->graph().rank_of(senders[i]) == other_rank) return true;
    }
  }
  return false;
}

bool StepEngine::needs_members(std::uint32_t members) const {
  for (std::int32_t local = 0; agreement_ != nullptr && local < table().num_tasks(); ++local) {
    if ((agreement_->absentees(local) & members) != 0) return true;
  }
  return false;
}

std::vector<void*> StepEngine::drain() {
  std::vector<void*> payloads;
  for (Input& input : inputs_) {
    if (input.payload != nullptr) payloads.push_back(input.payload);
    input.payload = nullptr;
  }
  return payloads;
}

}  // namespace rrfp
