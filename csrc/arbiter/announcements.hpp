// Announcements: tasks of this rank whose last input is being computed elsewhere, and when it is
// due: what hint-gated waiting looks at. An announcement is a word that may be lost: without it
// nothing is waited for.
//
// Threads  announce(): any number of threads, one at a time for one task. The rest: the worker.
// Progress announce() is lock-free (PushList::push()); it allocates nothing.
// Bound    one announcement per task, fixed at construction; the open ones have room for a few
//          before collect() allocates.
// Edges    none of its own: the slot is written before PushList::push() and read by who takes the
//          list (P1 there).
// Cost     announce(): one CAS. collect(): O(1) per new announcement, O(open ones).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "base/prefetch.hpp"
#include "base/push_list.hpp"

namespace rrfp {

struct Announcement {
  std::int32_t local = -1;
  std::int64_t received_ns = 0;  // by this rank's clock
  std::int64_t expected_ns = 0;  // what the announced task usually takes there
};

class Announcements {
 public:
  // For none of a rank's tasks where num_tasks is 0.
  explicit Announcements(std::int32_t num_tasks,
                         std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : slots_(num_tasks, memory), is_known_(num_tasks, false, memory), open_(memory) {
    open_.reserve(std::min(num_tasks, 64));
  }

  // False: this task was announced before, or nothing is to be announced; nothing changed.
  bool announce(const Announcement& announcement) {
    if (slots_.empty()) return false;
    Slot& slot = slots_[announcement.local];
    // A slot belongs to whoever writes it first. Its sender speaks from one thread at a time.
    if (slot.word.local >= 0) return false;
    slot.word = announcement;
    new_.push(&slot);
    return true;
  }

  // Moves what is new to the open ones, and drops those for which `is_over` holds.
  template <class IsOver>
  const std::pmr::vector<Announcement>& collect(const IsOver& is_over) {
    for (Slot* slot = new_.take_all(); slot != nullptr; slot = slot->next) {
      is_known_[slot->word.local] = true;
      open_.push_back(slot->word);
    }
    std::erase_if(open_, is_over);
    return open_;
  }

  // What collect() has seen of the task, or null.
  const Announcement* of(std::int32_t local) const {
    return !slots_.empty() && is_known_[local] ? &slots_[local].word : nullptr;
  }

  void prefetch(std::int32_t local) const {
    if (!slots_.empty()) rrfp::prefetch(&slots_[local]);
  }

 private:
  struct Slot {
    Slot* next = nullptr;  // PushList's
    Announcement word;
  };

  PushList<Slot> new_;
  std::pmr::vector<Slot> slots_;  // by local
  // The worker's.
  std::pmr::vector<bool> is_known_;  // by local
  std::pmr::vector<Announcement> open_;
};

}  // namespace rrfp
