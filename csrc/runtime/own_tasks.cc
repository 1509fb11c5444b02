#include "runtime/own_tasks.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>

#include "base/check.hpp"

namespace rrfp {

namespace {

using Lists = std::vector<std::vector<std::int32_t>>;

// Tasks of one kind on one stage: a task is known by its microbatch.
std::vector<Task> as_forwards(const std::vector<std::int32_t>& order) {
  std::vector<Task> tasks;
  for (const std::int32_t task : order) tasks.push_back({0, TaskKind::kForward, task});
  return tasks;
}

std::vector<std::int32_t> given_places(std::size_t num_tasks) {
  std::vector<std::int32_t> places(num_tasks);
  std::iota(places.begin(), places.end(), 0);
  return places;
}

std::string number(std::int32_t task) { return "task " + std::to_string(task); }

void check_graph(const Lists& after) {
  const auto num_tasks = static_cast<std::int32_t>(after.size());
  for (std::int32_t task = 0; task < num_tasks; ++task) {
    for (const std::int32_t before : after[task]) {
      RRFP_CHECK(before >= 0 && before < num_tasks && before != task,
                 number(task) + " waits for " + number(before) + ", but the tasks are 0 to " +
                     std::to_string(num_tasks - 1) + " and none waits for itself");
    }
  }
  RRFP_CHECK(circle_of_tasks(after).empty(), "the tasks wait for one another in a circle");
}

}  // namespace

std::vector<std::int32_t> circle_of_tasks(const Lists& after) {
  // Takes away what waits for nothing that is left; of the rest each waits for another of it.
  std::vector<std::int32_t> num_missing(after.size(), 0);
  Lists dependents(after.size());
  std::vector<std::int32_t> free;
  for (std::size_t task = 0; task < after.size(); ++task) {
    num_missing[task] = static_cast<std::int32_t>(after[task].size());
    if (after[task].empty()) free.push_back(static_cast<std::int32_t>(task));
    for (const std::int32_t before : after[task]) {
      dependents[before].push_back(static_cast<std::int32_t>(task));
    }
  }
  for (std::size_t i = 0; i < free.size(); ++i) {
    for (const std::int32_t next : dependents[free[i]]) {
      if (--num_missing[next] == 0) free.push_back(next);
    }
  }
  if (free.size() == after.size()) return {};
  const auto is_left = [&](std::int32_t task) { return num_missing[task] > 0; };
  std::int32_t at = 0;
  while (!is_left(at)) ++at;
  std::vector<std::int32_t> path;
  while (std::find(path.begin(), path.end(), at) == path.end()) {
    path.push_back(at);
    at = *std::find_if(after[at].begin(), after[at].end(), is_left);
  }
  path.erase(path.begin(), std::find(path.begin(), path.end(), at));
  return path;
}

OwnTasks::OwnTasks(const Lists& after, const std::vector<std::int32_t>& order, std::int32_t slack)
    : table_({0}, {TaskKind::kForward}, static_cast<std::int32_t>(after.size())),
      order_(table_, HintRule::kOrder, as_forwards(order)),
      arbiter_(table_, order_, {.slack = slack, .units_returned = false},
               given_places(after.size())),
      dependents_(after.size()),
      num_missing_(after.size()) {
  check_graph(after);
  for (std::int32_t task = 0; task < table_.num_tasks(); ++task) {
    num_missing_[task].store(static_cast<std::int32_t>(after[task].size()),
                             std::memory_order_relaxed);  // nobody else is here yet
    for (const std::int32_t before : after[task]) {
      dependents_[before].push_back(task);
      RRFP_CHECK(slack == kUnlimited || order_.position_of(before) < order_.position_of(task),
                 "with slack " + std::to_string(slack) + " the order must list " +
                     number(before) + " before " + number(task) + ", which waits for it");
    }
  }
}

std::vector<std::int32_t> OwnTasks::first_ready() const {
  std::vector<std::int32_t> ready;
  for (std::int32_t position = 0; position < order_.num_tasks(); ++position) {
    const std::int32_t task = order_.local_at(position);
    // Before the first claim nobody changes the counts.
    if (num_missing_[task].load(std::memory_order_relaxed) == 0) ready.push_back(task);
  }
  return ready;
}

void OwnTasks::arrive(std::int32_t task) {
  RRFP_INVARIANT(arbiter_.arrive(task), number(task) + " became ready twice");
  {
    std::lock_guard lock(mutex_);  // a claim() that found nothing is asleep now, or looks again
  }
  changed_.notify_one();
}

std::int32_t OwnTasks::claim(std::int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  std::int32_t answer = kNothing;
  const auto can_answer = [&] {
    if (is_ended_) return answer = kEnded, true;
    const Choice choice = arbiter_.select();
    if (choice.local >= 0) {
      arbiter_.commit(choice);
      return answer = choice.local, true;
    }
    return choice.blocked == Blocked::kDone ? (answer = kDone, true) : false;
  };
  changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), can_answer);
  lock.unlock();
  // A claim may end other waits: all are claimed, or bounded slack lets the next one pass.
  if (answer >= 0) changed_.notify_all();
  return answer;
}

std::vector<std::int32_t> OwnTasks::retire(std::int32_t task) {
  std::vector<std::int32_t> ready;
  for (const std::int32_t next : dependents_.at(task)) {
    if (num_missing_[next].fetch_sub(1, std::memory_order_acq_rel) == 1) {  // T1
      ready.push_back(next);
    }
  }
  std::sort(ready.begin(), ready.end(), [&](std::int32_t a, std::int32_t b) {
    return order_.position_of(a) < order_.position_of(b);
  });
  return ready;
}

void OwnTasks::end() {
  {
    std::lock_guard lock(mutex_);
    is_ended_ = true;
  }
  changed_.notify_all();
}

}  // namespace rrfp
