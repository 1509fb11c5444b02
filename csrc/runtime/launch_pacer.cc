#include "runtime/launch_pacer.hpp"

#include <algorithm>

namespace rrfp {

namespace {

std::int64_t deviation_ns(const TaskTimes& times, TaskKind kind, std::int32_t chunk) {
  const auto mean_ns = static_cast<double>(times.duration_ns(kind, chunk));
  return static_cast<std::int64_t>(times.variation(kind, chunk) * mean_ns);
}

void add_bounded(TaskTimes& times, TaskKind kind, std::int32_t chunk, std::int64_t latest_ns) {
  const std::int64_t mean_ns = times.duration_ns(kind, chunk);
  if (mean_ns > 0) latest_ns = std::min(latest_ns, LaunchPacer::kMostGrowth * mean_ns);
  times.add_duration(kind, chunk, latest_ns);
}

}  // namespace

LaunchPacer::LaunchPacer(std::int32_t num_chunks)
    : on_device_(num_chunks),
      on_host_(num_chunks),
      has_launched_(static_cast<std::size_t>(num_chunks) * kNumTaskKinds) {}

void LaunchPacer::begin_step(const TaskTable& table, Lookahead lookahead) {
  classes_.clear();
  for (std::int32_t each = 0; each < table.num_classes(); ++each) {
    classes_.emplace_back(table.kind_of_class(each), table.chunk_of_class(each));
  }
  lookahead_ = lookahead;
  unfinished_.clear();
  last_end_ = {};
  last_look_ns_ = 0;
  choose_from_ns_ = 0;
}

void LaunchPacer::claimed(TaskKind kind, std::int32_t chunk, std::int64_t now_ns, bool waited) {
  const bool was_free = !waited && last_look_ns_ > 0;
  claimed_ = {kind, chunk, was_free ? last_look_ns_ : now_ns};
}

void LaunchPacer::launched(std::int64_t now_ns) {
  claimed_.launched_ns = now_ns;
  learn_on_host(claimed_);
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
  learn_on_device(task, std::max<std::int64_t>(0, last_end_.low_ns - begin.high_ns),
                  last_end_.high_ns - begin.low_ns);
}

void LaunchPacer::learn_on_device(const Launch& task, std::int64_t low_ns, std::int64_t high_ns) {
  const std::int64_t mean_ns = on_device_.duration_ns(task.kind, task.chunk);
  if (high_ns <= 0) return;
  const std::int64_t nearest_ns = std::clamp(mean_ns, low_ns, high_ns);
  const bool is_outside = mean_ns > 0 && nearest_ns != mean_ns;
  if (is_outside || (high_ns - low_ns) * kWidest <= high_ns) {
    add_bounded(on_device_, task.kind, task.chunk, nearest_ns);
  }
}

void LaunchPacer::learn_on_host(const Launch& task) {
  const auto at = static_cast<std::size_t>(task.kind) * num_chunks() + task.chunk;
  if (has_launched_[at]) {
    add_bounded(on_host_, task.kind, task.chunk, task.launched_ns - task.since_ns);
  }
  has_launched_[at] = true;
}

// What the next launch usually takes, whichever it is; 0: not known.
std::int64_t LaunchPacer::launch_ns() const {
  std::int64_t dearest_ns = 0;
  for (const auto& [kind, chunk] : classes_) {
    const std::int64_t mean_ns = on_host_.duration_ns(kind, chunk);
    if (mean_ns == 0) return 0;
    dearest_ns = std::max(dearest_ns, mean_ns + deviation_ns(on_host_, kind, chunk));
  }
  return dearest_ns;
}

std::int64_t LaunchPacer::next_choice_ns() const {
  if (unfinished_.empty()) return 0;
  if (unfinished_.size() > 1 || lookahead_ == Lookahead::kNone) return kNotBeforeAnEnd;
  if (lookahead_ == Lookahead::kEager) return 0;
  const Launch& running = unfinished_.front();
  const std::int64_t usual_ns = on_device_.duration_ns(running.kind, running.chunk);
  const std::int64_t next_ns = launch_ns();
  if (usual_ns == 0 || next_ns == 0) return 0;
  const std::int64_t begun_ns = std::max(running.since_ns, last_end_.low_ns);
  return begun_ns + usual_ns - deviation_ns(on_device_, running.kind, running.chunk) - next_ns -
         kAheadNs;
}

}  // namespace rrfp
