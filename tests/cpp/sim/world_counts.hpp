// WorldCounts: what the seeds met, so that a run can show that it saw all of it.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim_rank.hpp"
#include "step_checkers.hpp"

namespace rrfp::test {

struct WorldCounts {
  std::map<std::string, std::int64_t> of;

  void add(const RandomStep& step) {
    for (const std::string& part : step.variability()) ++of["steps with " + part];
  }
  void add(const AdmissionCounts& admission) {
    of["admitted by level"] += admission.levelled;
    of["admitted as the earliest"] += admission.earliest;
    of["admitted beside the earliest"] += admission.not_earliest;
    of["held back by level"] += admission.levelled_held;
    of["held back for the earliest"] += admission.not_earliest_held;
    of["admitted by bytes"] += admission.bytes;
    of["held back by bytes"] += admission.bytes_held;
  }
  void add(const Fault& fault, bool has_skips, const SimNetwork& network,
           const std::vector<std::unique_ptr<SimRank>>& ranks) {
    std::int64_t fault_ns = network.fault_ns;
    const SimRank* failed = nullptr;
    for (const auto& rank : ranks) {
      fault_ns = std::max(fault_ns, rank->fault_ns());
      if (rank->phase() == SimRank::Phase::kFailed) failed = rank.get();
      of["late messages dropped"] += rank->num_late();
      of["waits for the hint"] += rank->num_hint_waits;
    }
    const bool struck = fault_ns >= 0 || fault.kind == FaultKind::kNone;
    if (!struck) return;
    static constexpr const char* kCodes[] = {"finished", "stage failed", "peer lost", "stalled",
                                             "protocol", "interrupted", "closed", "timed out"};
    of[std::string(name_of(fault.kind)) + ": " +
              kCodes[failed ? static_cast<std::size_t>(failed->status().code) : 0]] += 1;
    of["headers refused"] += network.refused_headers;
    of["graphs with skips"] += has_skips;
  }
};

}  // namespace rrfp::test
