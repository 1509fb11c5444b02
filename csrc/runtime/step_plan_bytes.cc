// Limits in bytes: what StepPlan checks of them, and what it hands to the arbiters.
#include <algorithm>
#include <limits>
#include <numeric>

#include "base/check.hpp"
#include "runtime/step_plan.hpp"

namespace rrfp {

namespace {

// Of one forward: so many of them still fit into 64 bits.
constexpr std::int64_t kLargestBytes = std::int64_t{1} << 46;

}  // namespace

bool StepPlan::counts_bytes() const {
  return std::any_of(options_.limits_bytes.begin(), options_.limits_bytes.end(),
                     [](std::int64_t limit_bytes) { return limit_bytes != kUnlimited; });
}

std::int64_t StepPlan::limit_bytes(std::int32_t rank) const {
  if (options_.limits_bytes.empty() || options_.forward_only) return kUnlimited;
  return options_.limits_bytes.at(rank);
}

void StepPlan::check_bytes() const {
  if (!counts_bytes()) return;
  RRFP_CHECK(static_cast<std::int32_t>(options_.limits_bytes.size()) == graph_->num_ranks(),
             "limits in bytes need one entry per rank: " + std::to_string(graph_->num_ranks()) +
                 ", got " + std::to_string(options_.limits_bytes.size()));
  RRFP_CHECK(options_.slack != 0,
             "an in-flight limit in bytes holds forwards back, which a fixed order (slack 0) "
             "cannot do; give the limit in microbatches, or allow slack");
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    const std::int64_t limit_bytes = options_.limits_bytes[rank];
    if (limit_bytes == kUnlimited) continue;
    const bool has_units = !options_.limits.empty() && options_.limits[rank] != 0;
    RRFP_CHECK(limit_bytes >= 0 && !has_units,
               "rank " + std::to_string(rank) + " has a limit of " +
                   std::to_string(limit_bytes) + " bytes and one in units, or a negative one");
    for (const std::int32_t stage : graph_->stages_of(rank)) {
      const bool is_known = stage < static_cast<std::int32_t>(options_.activation_bytes.size()) &&
                            static_cast<std::int32_t>(options_.activation_bytes[stage].size()) ==
                                options_.num_microbatches;
      RRFP_CHECK(is_known, "a limit in bytes on rank " + std::to_string(rank) +
                               " needs the activation bytes of every microbatch of stage " +
                               std::to_string(stage));
      for (const std::int64_t bytes : options_.activation_bytes[stage]) {
        RRFP_CHECK(bytes >= 0 && bytes <= kLargestBytes,
                   "activation bytes of stage " + std::to_string(stage) + " list " +
                       std::to_string(bytes) + "; they must be from 0 to 2^46");
      }
    }
  }
}

std::vector<std::int64_t> StepPlan::forward_bytes(std::int32_t rank) const {
  std::vector<std::int64_t> sizes;
  if (limit_bytes(rank) == kUnlimited) return sizes;
  for (const std::int32_t stage : graph_->stages_of(rank)) {
    const auto& of_stage = options_.activation_bytes[stage];
    sizes.insert(sizes.end(), of_stage.begin(), of_stage.end());
  }
  return sizes;
}

// The largest limit of any rank. A hint "auto" looks at it to see how much room there is.
std::int32_t StepPlan::units_for_policy() const {
  std::int32_t most = 0;
  for (std::int32_t rank = 0; rank < graph_->num_ranks(); ++rank) {
    std::int32_t units = options_.limits.empty() ? 0 : options_.limits[rank];
    const std::vector<std::int64_t> sizes = forward_bytes(rank);
    if (!sizes.empty()) {
      const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
      const double mean = static_cast<double>(total) / static_cast<double>(sizes.size());
      const double fit = static_cast<double>(limit_bytes(rank)) / std::max(mean, 1.0);
      const double all = std::numeric_limits<std::int32_t>::max();
      units = static_cast<std::int32_t>(std::clamp(fit, 1.0, all));
    }
    if (units == 0) units = default_limit_units(*graph_, options_.microbatch_order);
    most = std::max(most, units);
  }
  return most;
}

}  // namespace rrfp
