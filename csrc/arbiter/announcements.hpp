// Announcements: tasks of this rank whose last input is being computed elsewhere, and when it is
// due: what hint-gated waiting looks at. An announcement is a word that may be lost: without it
// nothing is waited for.
//
// Threads  announce(): any number of threads, one at a time for one task. The rest: the worker.
// Progress announce() is wait-free; it allocates nothing.
// Bound    one announcement per task, fixed at construction.
// Edges    none of its own: the slot is written before ReadySet::arrive() and read after the
//          worker has found the bit (R1 there).
// Lifetime `table` and `order` must outlive it.
// Cost     collect(): O(log64 tasks) per class and per new announcement.
#pragma once

#include <cstdint>
#include <vector>

#include "arbiter/hint_order.hpp"
#include "arbiter/ready_set.hpp"

namespace rrfp {

struct Announcement {
  std::int32_t local = -1;
  std::int64_t received_ns = 0;  // by this rank's clock
  std::int64_t expected_ns = 0;  // what the announced task usually takes there
};

class Announcements {
 public:
  Announcements(const TaskTable& table, const HintOrder& order)
      : table_(table),
        order_(order),
        is_new_(std::vector<std::int32_t>(table.num_classes(), table.num_microbatches())),
        slots_(table.num_tasks()),
        is_known_(table.num_tasks(), false) {
    open_.reserve(table.num_tasks());
  }

  // False: this task was announced before, and nothing changed.
  bool announce(const Announcement& announcement) {
    const std::int32_t local = announcement.local;
    // A slot belongs to whoever writes it first. Its sender speaks from one thread at a time.
    if (slots_[local].local >= 0) return false;
    slots_[local] = announcement;
    return is_new_.arrive(table_.class_of(local), order_.index_in_class(local));
  }

  // Moves what is new to the open ones, and drops those for which `is_over` holds.
  template <class IsOver>
  const std::vector<Announcement>& collect(const IsOver& is_over) {
    for (std::int32_t task_class = 0; task_class < table_.num_classes(); ++task_class) {
      for (std::int32_t index; (index = is_new_.head(task_class)) >= 0;) {
        is_new_.claim(task_class, index);
        const std::int32_t local = order_.local_in_class(task_class, index);
        is_known_[local] = true;
        open_.push_back(slots_[local]);
      }
    }
    std::erase_if(open_, is_over);
    return open_;
  }

  // What collect() has seen of the task, or null.
  const Announcement* of(std::int32_t local) const {
    return is_known_[local] ? &slots_[local] : nullptr;
  }

 private:
  const TaskTable& table_;
  const HintOrder& order_;
  ReadySet<> is_new_;
  std::vector<Announcement> slots_;  // by local
  // The worker's.
  std::vector<bool> is_known_;       // by local
  std::vector<Announcement> open_;
};

}  // namespace rrfp
