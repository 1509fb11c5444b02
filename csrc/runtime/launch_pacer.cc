#include "runtime/launch_pacer.hpp"

#include <algorithm>
#include <functional>

namespace rrfp {

std::int64_t LaunchPacer::Recent::shortest_ns() const {
  if (num_ == 0) return 0;
  return *std::min_element(times_.begin(), times_.begin() + std::min(num_, kNumRecent));
}

std::int64_t LaunchPacer::Recent::longest_but_one_ns() const {
  if (num_ < 2) return 0;
  std::array<std::int64_t, kNumRecent> sorted = times_;
  const auto end = sorted.begin() + std::min(num_, kNumRecent);
  std::nth_element(sorted.begin(), sorted.begin() + 1, end, std::greater<>());
  return sorted[1];
}

LaunchPacer::LaunchPacer(std::int32_t num_chunks)
    : num_chunks_(num_chunks), times_(static_cast<std::size_t>(num_chunks) * kNumTaskKinds) {}

void LaunchPacer::begin_step(const TaskTable& table, Lookahead lookahead) {
  classes_.clear();
  for (std::int32_t each = 0; each < table.num_classes(); ++each) {
    classes_.emplace_back(table.kind_of_class(each), table.chunk_of_class(each));
  }
  lookahead_ = lookahead;
  num_unclaimed_ = table.num_tasks();
  unfinished_.clear();
  last_end_ = {};
  last_look_ns_ = 0;
  choose_from_ns_ = 0;
}

void LaunchPacer::claimed(TaskKind kind, std::int32_t chunk, std::int64_t now_ns, bool waited) {
  --num_unclaimed_;
  const bool was_free = !waited && last_look_ns_ > 0;
  claimed_ = {kind, chunk, was_free ? last_look_ns_ : now_ns};
}

void LaunchPacer::launched(std::int64_t now_ns) {
  claimed_.launched_ns = now_ns;
  of(claimed_.kind, claimed_.chunk).on_host.add(now_ns - claimed_.since_ns);
  unfinished_.push_back(claimed_);
  choose_from_ns_ = next_choice_ns();
}

void LaunchPacer::look(std::int64_t now_ns, std::size_t num_unfinished) {
  const std::size_t num_before = unfinished_.size();
  while (unfinished_.size() > num_unfinished) ended(now_ns);
  last_look_ns_ = now_ns;
  if (unfinished_.size() < num_before) choose_from_ns_ = next_choice_ns();
}

void LaunchPacer::ended(std::int64_t now_ns) {
  const Launch task = unfinished_.front();
  unfinished_.pop_front();
  const Between begin = {std::max(task.since_ns, last_end_.low_ns),
                         task.is_held_up ? kNotBeforeAnEnd
                                         : std::max(task.launched_ns, last_end_.high_ns)};
  last_end_ = {std::max({task.launched_ns, last_look_ns_, last_end_.low_ns}), now_ns};
  learn(of(task.kind, task.chunk).on_device,
        std::max<std::int64_t>(0, last_end_.low_ns - begin.high_ns),
        last_end_.high_ns - begin.low_ns);
}

void LaunchPacer::learn(Recent& on_device, std::int64_t low_ns, std::int64_t high_ns) {
  const std::int64_t shortest_ns = on_device.shortest_ns();
  const std::int64_t nearest_ns = std::clamp(shortest_ns, low_ns, high_ns);
  const bool contradicts = shortest_ns > 0 && nearest_ns != shortest_ns;
  if (contradicts || (high_ns - low_ns) * kWidest <= high_ns) on_device.add(nearest_ns);
}

// What the next launch takes, whichever it is; 0: not known.
std::int64_t LaunchPacer::launch_ns() {
  std::int64_t dearest_ns = 0;
  for (const auto& [kind, chunk] : classes_) {
    const std::int64_t own_ns = of(kind, chunk).on_host.longest_but_one_ns();
    if (own_ns == 0) return 0;
    dearest_ns = std::max(dearest_ns, own_ns);
  }
  return dearest_ns;
}

std::int64_t LaunchPacer::next_choice_ns() {
  if (unfinished_.empty()) return 0;
  if (unfinished_.size() > 1 || lookahead_ == Lookahead::kNone) return kNotBeforeAnEnd;
  if (lookahead_ == Lookahead::kEager || num_unclaimed_ <= 1) return 0;
  const Launch& running = unfinished_.front();
  const std::int64_t task_ns = of(running.kind, running.chunk).on_device.shortest_ns();
  const std::int64_t next_ns = launch_ns();
  if (task_ns == 0 || next_ns == 0) return 0;
  return std::max(running.since_ns, last_end_.low_ns) + task_ns - next_ns - kAheadNs;
}

}  // namespace rrfp
