#include "arbiter/arbiter.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "base/check.hpp"

namespace rrfp {

namespace {

constexpr std::int32_t kNone = -1;

std::pmr::vector<std::int32_t> inverse(const std::vector<std::int32_t>& place_of_microbatch,
                                       std::pmr::memory_resource* memory) {
  std::pmr::vector<std::int32_t> microbatch_at_place(place_of_microbatch.size(), kNone, memory);
  for (std::size_t m = 0; m < place_of_microbatch.size(); ++m) {
    const auto place = static_cast<std::size_t>(place_of_microbatch[m]);
    RRFP_INVARIANT(place < microbatch_at_place.size() && microbatch_at_place[place] == kNone,
                   "the step's microbatch order is no permutation");
    microbatch_at_place[place] = static_cast<std::int32_t>(m);
  }
  return microbatch_at_place;
}

}  // namespace

Arbiter::Arbiter(const TaskTable& table, const HintOrder& order, const ArbiterOptions& options,
                 const std::vector<std::int32_t>& place_of_microbatch, const TaskTimes* times,
                 std::pmr::memory_resource* memory)
    : table_(table),
      order_(order),
      options_(options),
      times_(times),
      ready_(std::vector<std::int32_t>(table.num_classes(), table.num_microbatches()), memory),
      claimed_(table.num_tasks(), memory),
      announced_(options.waits() ? table.num_tasks() : 0, memory),
      classes_(memory),
      by_role_(memory),
      has_earliest_(options.admission == AdmissionRule::kEarliest ||
                    options.slack != kUnlimited),
      microbatch_at_place_(inverse(place_of_microbatch, memory)),
      progress_(table.num_microbatches(), memory),
      bytes_(options.units_returned ? options.limit_bytes : kUnlimited, options.forward_bytes,
             table.num_chunks(), table.num_microbatches()) {
  RRFP_INVARIANT(times != nullptr || !options.waits(), "waiting needs the usual times");
  RRFP_INVARIANT(place_of_microbatch.size() == progress_.size(),
                 "the step's microbatch order has another length than the step");
  RRFP_INVARIANT(options.slack >= kUnlimited && options.limit_units >= kUnlimited,
                 "slack and limit are counts, or kUnlimited");
  RRFP_INVARIANT(options.limit_bytes == kUnlimited ||
                     (options.limit_units == kUnlimited && options.slack != 0 &&
                      options.admission == AdmissionRule::kEarliest),
                 "a limit in bytes takes the place of units, under the rule of the earliest");
  RRFP_INVARIANT(options.weight_in_order ||
                     (options.forward_in_order.empty() && options.input_in_order.empty()),
                 "forwards and input gradients in order need weight gradients in order");
  RRFP_INVARIANT(options.slack != 0 || !options.units_returned ||
                     options.limit_units == kUnlimited ||
                     options.limit_units >= order.peak_units(),
                 "the limit is below the peak of the fixed order");
  for (std::int32_t task_class = 0; task_class < table.num_classes(); ++task_class) {
    classes_.push_back({table.kind_of_class(task_class), keeps_order(task_class),
                        table.chunk_of_class(task_class)});
  }
  sort_by_role();
}

void Arbiter::sort_by_role() {
  by_role_.resize(classes_.size());
  std::iota(by_role_.begin(), by_role_.end(), 0);
  const auto role_of = [&](std::int32_t task_class) {
    const TaskKind kind = classes_[task_class].kind;
    return kind == TaskKind::kForward ? 0 : kind == TaskKind::kWeightGrad ? 2 : 1;
  };
  std::stable_sort(by_role_.begin(), by_role_.end(), [&](std::int32_t a, std::int32_t b) {
    if (role_of(a) != role_of(b)) return role_of(a) < role_of(b);
    return role_of(a) == 1 && classes_[a].chunk > classes_[b].chunk;
  });
  const auto of_role = [&](int role) {
    const auto first = std::find_if(by_role_.begin(), by_role_.end(),
                                    [&](std::int32_t c) { return role_of(c) == role; });
    const auto last = std::find_if(first, by_role_.end(),
                                   [&](std::int32_t c) { return role_of(c) != role; });
    return std::span<const std::int32_t>(first, last);
  };
  forward_classes_ = of_role(0);
  backward_classes_ = of_role(1);
  weight_classes_ = of_role(2);
}

bool Arbiter::arrive(std::int32_t local) {
  return ready_.arrive(table_.class_of(local), order_.index_in_class(local));
}

Choice Arbiter::select(std::int64_t now_ns) {
  HeldBack held;
  const std::int32_t local = options_.slack == 0 ? select_fixed() : select_by_rule(held);
  if (local != kNone) {
    const std::int64_t until_ns = options_.waits() ? wait_until_ns(local, now_ns) : 0;
    if (until_ns != 0) return {kNone, Blocked::kHint, 0, until_ns};
    return choice_of(local);
  }
  if (!options_.rounds_by_claims) second_half_ = false;
  if (num_claimed() == order_.num_tasks()) return {kNone, Blocked::kDone, 0};
  if (held.by_limit) return {kNone, Blocked::kLimit, 0};
  if (held.by_slack ||
      ((options_.slack == 0 || options_.weight_in_order) && anything_ready())) {
    return {kNone, Blocked::kSlack, 0};
  }
  return {kNone, Blocked::kInput, 0};
}

Choice Arbiter::choice_of(std::int32_t local) const {
  if (local < 0 || local >= order_.num_tasks() || !is_ready(local)) return {};
  return {local, Blocked::kNot, claimed_.num_unclaimed_before(order_.position_of(local))};
}

void Arbiter::commit(const Choice& choice) {
  const std::int32_t local = choice.local;
  const bool was_ready =
      local != kNone && ready_.claim(table_.class_of(local), order_.index_in_class(local));
  RRFP_INVARIANT(was_ready, "commit() of a task that is not ready");
  claimed_.claim(order_.position_of(local));
  move_units(local);
  const TaskKind kind = kind_of(local);
  const bool is_backward = kind == TaskKind::kBackward || kind == TaskKind::kInputGrad;
  second_half_ = (has_rounds() && is_backward) ||
                 (order_.rule() == HintRule::kForwardBackward && kind == TaskKind::kForward);
}

std::int32_t Arbiter::select_fixed() {
  if (first_unclaimed_position() == order_.num_tasks()) return kNone;
  const std::int32_t local = order_.local_at(first_unclaimed_position());
  return is_ready(local) ? local : kNone;
}

std::int32_t Arbiter::select_by_rule(HeldBack& held) {
  bool forward_first = false;
  switch (order_.rule()) {
    case HintRule::kOrder: return best_by_position(held);
    case HintRule::kOrderThenWeight: {
      const std::int32_t local = lower_position(best_backward(), best_forward(held));
      return local != kNone ? local : best_weight_grad();
    }
    case HintRule::kBackwardForward:
    case HintRule::kRoundsByPosition: forward_first = second_half_; break;
    case HintRule::kForwardBackward: forward_first = !second_half_; break;
    case HintRule::kBackwardPriority: forward_first = false; break;
    case HintRule::kForwardPriority: forward_first = true; break;
  }
  std::int32_t local = forward_first ? best_forward(held) : best_backward();
  if (local == kNone) local = forward_first ? best_backward() : best_forward(held);
  return local != kNone ? local : best_weight_grad();
}

std::int32_t Arbiter::best_by_position(HeldBack& held) {
  std::int32_t best = best_weight_grad();
  for (const std::int32_t c : backward_classes_) best = lower_position(best, head_of(c));
  for (const std::int32_t c : forward_classes_) best = lower_position(best, forward_of(c, held));
  return best;
}

std::int32_t Arbiter::best_forward(HeldBack& held) {
  std::int32_t best = kNone;
  for (const std::int32_t c : forward_classes_) {
    best = lower_position(best, forward_of(c, held));
    if (best != kNone && !position_decides()) break;
  }
  return best;
}

std::int32_t Arbiter::best_backward() {
  std::int32_t best = kNone;
  for (const std::int32_t c : backward_classes_) {
    best = lower_position(best, head_of(c));
    if (best != kNone && !position_decides()) break;
  }
  return best;
}

std::int32_t Arbiter::best_weight_grad() {
  std::int32_t best = kNone;
  for (const std::int32_t c : weight_classes_) best = lower_position(best, head_of(c));
  return best;
}

std::int32_t Arbiter::forward_of(std::int32_t task_class, HeldBack& held) {
  const std::int32_t head = head_of(task_class);
  if (head == kNone) return kNone;
  const auto may_run = [&](std::int32_t local) {
    const bool by_slack = !within_slack(local);
    const bool by_limit = !by_slack && !admits(local);
    held.by_slack |= by_slack;
    held.by_limit |= by_limit;
    return !by_slack && !by_limit;
  };
  // The others of the class stand later; the limit treats them alike (units), or must not prefer
  // the smaller ones (bytes). The earliest is the exception.
  if (may_run(head)) return head;
  if (options_.admission == AdmissionRule::kLevelled || classes_[task_class].keeps_order) {
    return kNone;
  }
  const std::int32_t earliest =
      table_.local_in(task_class, microbatch_at_place_[earliest_place_]);
  return earliest != head && is_ready(earliest) && may_run(earliest) ? earliest : kNone;
}

std::int32_t Arbiter::head_of(std::int32_t task_class) {
  if (!classes_[task_class].keeps_order) {
    const std::int32_t index = ready_.head(task_class);
    return index < 0 ? kNone : order_.local_in_class(task_class, index);
  }
  const std::int32_t place = classes_[task_class].next_place;
  if (place == table_.num_microbatches()) return kNone;
  const std::int32_t next = table_.local_in(task_class, microbatch_at_place_[place]);
  return is_ready(next) ? next : kNone;
}

void Arbiter::prefetch(std::int32_t local) const {
  ready_.prefetch_heads();
  claimed_.prefetch();
  rrfp::prefetch(classes_.data(), classes_.size() * sizeof(Class));
  order_.prefetch(local);
  announced_.prefetch(local);
}

std::int32_t Arbiter::prefetch_next(std::int32_t task_class) const {
  const std::int32_t place = classes_[task_class].next_place;
  if (place == table_.num_microbatches()) return kNone;
  const std::int32_t local = table_.local_in(task_class, place);
  ready_.prefetch(task_class, place);
  order_.prefetch_in_class(task_class, place);
  order_.prefetch(local);
  return local;
}

bool Arbiter::keeps_order(std::int32_t task_class) const {
  const auto named = [&](const std::vector<bool>& chunks) {
    return !chunks.empty() && chunks[table_.chunk_of_class(task_class)];
  };
  switch (table_.kind_of_class(task_class)) {
    case TaskKind::kForward: return named(options_.forward_in_order);
    case TaskKind::kInputGrad: return named(options_.input_in_order);
    case TaskKind::kBackward:
    case TaskKind::kWeightGrad: return options_.weight_in_order;
  }
  return false;
}

std::int32_t Arbiter::lower_position(std::int32_t local, std::int32_t other) const {
  if (local == kNone) return other;
  if (other == kNone) return local;
  return order_.position_of(local) < order_.position_of(other) ? local : other;
}

bool Arbiter::is_ready(std::int32_t local) const {
  return ready_.contains(table_.class_of(local), order_.index_in_class(local));
}

bool Arbiter::anything_ready() {
  for (std::int32_t task_class = 0; task_class < ready_.num_classes(); ++task_class) {
    if (ready_.head(task_class) >= 0) return true;
  }
  return false;
}

bool Arbiter::within_slack(std::int32_t local) const {
  if (options_.slack == kUnlimited ||
      order_.position_of(local) - first_unclaimed_position() <= options_.slack) {
    return true;
  }
  const std::int32_t microbatch = table_.microbatch_of(local);
  return microbatch == microbatch_at_place_[earliest_place_] &&
         progress_[microbatch].forwards_claimed > 0;
}

bool Arbiter::admits(std::int32_t local) const {
  const std::int32_t num_chunks = table_.num_chunks();
  if (options_.admission == AdmissionRule::kLevelled) {
    return free_units() >= num_chunks - classes_[table_.class_of(local)].chunk;
  }
  const std::int32_t earliest = microbatch_at_place_[earliest_place_];
  if (bytes_.has_limit()) {
    return bytes_.admits(classes_[table_.class_of(local)].chunk,
                         table_.microbatch_of(local), earliest,
                         unfinished_place_ == earliest_place_);
  }
  if (table_.microbatch_of(local) == earliest) return free_units() >= 1;
  return free_units() >= num_chunks - progress_[earliest].units_held + 1;
}

std::int64_t Arbiter::due_ns(const Announcement& announcement) const {
  const Class& of = classes_[table_.class_of(announcement.local)];
  return announcement.received_ns + announcement.expected_ns +
         times_->travel_ns(of.kind, of.chunk);
}

// This rank's tasks of the kind stand for those of the sender.
std::int64_t Arbiter::overdue_ns(const Announcement& announcement) const {
  const Class& of = classes_[table_.class_of(announcement.local)];
  const double variation = times_->variation(of.kind, of.chunk);
  return due_ns(announcement) +
         static_cast<std::int64_t>(std::min(kGrace * variation, kMostGrace) *
                                   static_cast<double>(announcement.expected_ns));
}

double Arbiter::most_wait_ns(std::int32_t chosen) const {
  const Class& of = classes_[table_.class_of(chosen)];
  const double patience = of.kind == TaskKind::kForward      ? options_.forward_patience
                          : of.kind == TaskKind::kWeightGrad ? options_.weight_patience
                                                             : 0.0;
  return patience * std::max(0.0, 1 - kDoubt * times_->variation(of.kind, of.chunk)) *
         static_cast<double>(times_->duration_ns(of.kind, of.chunk));
}

std::int64_t Arbiter::wait_until_ns(std::int32_t chosen, std::int64_t now_ns) {
  const auto& open = announced_.collect([&](const Announcement& announcement) {
    return overdue_ns(announcement) <= now_ns || is_ready(announcement.local) ||
           claimed_.is_claimed(order_.position_of(announcement.local));
  });
  const double most_ns = most_wait_ns(chosen);
  if (most_ns <= 0) return 0;
  std::int64_t until_ns = 0;
  for (const Announcement& announcement : open) {
    if (static_cast<double>(due_ns(announcement) - now_ns) > most_ns) continue;
    const std::int64_t at_ns = overdue_ns(announcement);
    if (until_ns != 0 && at_ns >= until_ns) continue;
    if (would_precede(announcement.local, chosen)) until_ns = at_ns;
  }
  return until_ns;
}

bool Arbiter::would_precede(std::int32_t announced, std::int32_t chosen) const {
  const std::int32_t task_class = table_.class_of(announced);
  if (classes_[task_class].keeps_order &&
      microbatch_at_place_[classes_[task_class].next_place] != table_.microbatch_of(announced)) {
    return false;  // others of its class run before it
  }
  const bool before_weight = kind_of(chosen) == TaskKind::kWeightGrad;
  if (kind_of(announced) == TaskKind::kForward &&
      (!before_weight || !within_slack(announced) || !admits(announced))) {
    return false;
  }
  const bool stands_before = order_.position_of(announced) < order_.position_of(chosen);
  switch (order_.rule()) {
    case HintRule::kOrder: return stands_before;
    case HintRule::kOrderThenWeight: return before_weight || stands_before;
    case HintRule::kBackwardForward: return before_weight || (stands_before && !second_half_);
    case HintRule::kRoundsByPosition: return before_weight || !second_half_;
    case HintRule::kForwardBackward: return before_weight || second_half_;
    case HintRule::kBackwardPriority: return true;
    case HintRule::kForwardPriority: return before_weight;
  }
  return false;
}

std::int32_t Arbiter::free_units() const {
  return options_.limit_units == kUnlimited ? std::numeric_limits<std::int32_t>::max()
                                            : options_.limit_units - units_held_;
}

void Arbiter::move_units(std::int32_t local) {
  const std::int32_t microbatch = table_.microbatch_of(local);
  Class& of = classes_[table_.class_of(local)];
  ++of.next_place;
  // The unit of an I stays until its W.
  const std::int32_t taken = !options_.units_returned           ? 0
                             : of.kind == TaskKind::kForward    ? 1
                             : of.kind == TaskKind::kInputGrad  ? 0
                                                                : -1;
  if (has_earliest_) move_earliest(microbatch, of.kind == TaskKind::kForward, taken);
  units_held_ += taken;
  if (bytes_.has_limit()) {
    if (taken > 0) bytes_.take(of.chunk, microbatch);
    if (taken < 0) bytes_.give_back(of.chunk, microbatch);
  }
  peak_units_ = std::max(peak_units_, units_held_);
  RRFP_INVARIANT(units_held_ >= 0 && free_units() >= 0, "units in flight are out of bounds");
}

void Arbiter::move_earliest(std::int32_t microbatch, bool is_forward, std::int32_t taken) {
  progress_[microbatch].forwards_claimed += is_forward;
  progress_[microbatch].units_held += taken;
  const auto at = [&](std::int32_t place) { return progress_[microbatch_at_place_[place]]; };
  while (earliest_place_ < table_.num_microbatches() &&
         at(earliest_place_).forwards_claimed == table_.num_chunks()) {
    ++earliest_place_;
  }
  while (unfinished_place_ < earliest_place_ && at(unfinished_place_).units_held == 0) {
    ++unfinished_place_;
  }
}

}  // namespace rrfp
