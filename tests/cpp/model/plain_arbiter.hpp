// PlainArbiter: the obvious rule as an arbiter, for searches that must find its deadlocks. The
// lowest position that is within slack (backwards and weight gradients are exempt) and, for an F,
// while a unit is free (in bytes: if it fits); what completes parameter gradients keeps the step's
// order if asked to.
#pragma once

#include <set>
#include <vector>

#include "arbiter/arbiter.hpp"

namespace rrfp::test {

class PlainArbiter {
 public:
  PlainArbiter(const TaskTable& table, const HintOrder& order, const ArbiterOptions& options,
               const std::vector<std::int32_t>& place_of_microbatch)
      : table_(table),
        order_(order),
        options_(options),
        places_(place_of_microbatch),
        done_(table.num_classes(), 0) {}

  void arrive(std::int32_t local) { ready_.insert(order_.position_of(local)); }

  Choice select() const {
    std::int32_t first_unclaimed = 0;
    while (claimed_.count(first_unclaimed) != 0) ++first_unclaimed;
    for (const std::int32_t position : ready_) {
      const bool fits = options_.limit_bytes == kUnlimited
                            ? held_ < options_.limit_units
                            : held_ + size_at(position) <= options_.limit_bytes;
      const bool held_back = !fits ||
                             (options_.slack != kUnlimited &&
                              position > first_unclaimed + options_.slack);
      if (kind_at(position) == TaskKind::kForward ? !held_back : is_due(position)) {
        return {order_.local_at(position)};
      }
    }
    return {};
  }

  void commit(const Choice& choice) {
    const std::int32_t position = order_.position_of(choice.local);
    ready_.erase(position);
    claimed_.insert(position);
    ++done_[table_.class_of(choice.local)];
    if (kind_at(position) == TaskKind::kForward) held_ += size_at(position);
    if (completes(position)) held_ -= size_at(position);
  }

 private:
  TaskKind kind_at(std::int32_t position) const {
    return table_.task(order_.local_at(position)).kind;
  }
  bool completes(std::int32_t position) const {
    return kind_at(position) == TaskKind::kBackward || kind_at(position) == TaskKind::kWeightGrad;
  }
  std::int64_t size_at(std::int32_t position) const {
    if (options_.limit_bytes == kUnlimited) return 1;
    const std::int32_t local = order_.local_at(position);
    const std::int32_t chunk = table_.chunk_of_class(table_.class_of(local));
    return options_.forward_bytes[chunk * table_.num_microbatches() + table_.microbatch_of(local)];
  }
  bool is_due(std::int32_t position) const {
    if (!options_.weight_in_order || !completes(position)) return true;
    const std::int32_t local = order_.local_at(position);
    return places_[table_.microbatch_of(local)] == done_[table_.class_of(local)];
  }

  const TaskTable& table_;
  const HintOrder& order_;
  const ArbiterOptions options_;
  const std::vector<std::int32_t> places_;
  std::set<std::int32_t> ready_, claimed_;  // positions
  std::vector<std::int32_t> done_;          // by class
  std::int64_t held_ = 0;  // units or bytes
};

}  // namespace rrfp::test
