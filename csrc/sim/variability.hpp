// Variability: how long the tasks of a step take and how late its messages are, drawn from a
// model and a seed, whatever policy then runs them. The models say what is known of real
// clusters: noise of every task, microbatches of different lengths, images beside text, stalls,
// jitter, slow stages and stages that are heavier than others.
//
// One unit is what F, I and W take each where nothing varies (B: two); messages take 0.05.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/task.hpp"

namespace rrfp::sim {

inline constexpr std::int64_t kUnitNs = 1000000;

// All fields are factors on top of one another; zero leaves a kind of variability out.
struct Variability {
  std::string name;
  double noise_cv = 0;         // every task x a lognormal factor of mean 1
  double length_sigma = 0;     // lengths of microbatches, lognormal of mean 1, cut at 16
  double quadratic = 0;        // share of the work that grows with the square of the length
  std::int32_t image_stages = 0;  // the first stages see images instead of lengths:
  double image_sigma = 0;         // lognormal of mean 1; 15 % of the microbatches have no image
  double stall_probability = 0;
  double stall_units = 0;      // how late a stalled message is
  double last_extra = 0;       // the last stage takes 1 + this times as long,
  double first_extra = 0;      // and the first
  std::int32_t slow_stages = 0;   // so many side by side, drawn,
  double slow_factor = 1;         // take so many times as long
  // With this probability F, I and B take longer by jitter_alpha x max(base, what the stage's
  // tasks of the kind took of late: 0.1 of the latest and 0.9 of those before) x (0.5 + U[0,1]).
  double jitter_probability = 0;
  double jitter_base_units = 0;
  double jitter_alpha = 0;
};

// Jitter of three strengths, J1 to J3, for a unit of `unit_ms`.
std::vector<Variability> jitters(double unit_ms);

// iid .3, iid 1, len(.5,.2), len(1,.2), mm(1,1,1,.3), mm(2,1,1,.5), stall(.05,2), stall(.05,10),
// mix(.7,.2,.02,5): the nine that scores are means over.
const std::vector<Variability>& scored_variabilities();

class StepDraw {
 public:
  StepDraw(const Variability& model, std::int32_t num_stages, std::int32_t num_microbatches,
           std::uint64_t seed);

  std::int64_t duration_ns(const Task& task) const { return durations_ns_[index(task)]; }
  // Of the message that carries what `from` has computed.
  std::int64_t latency_ns(const Task& from) const { return latencies_ns_[index(from)]; }
  // What is known of a microbatch before the step: its work without noise, over all stages.
  const std::vector<double>& costs() const { return costs_; }

 private:
  double share_of_stage(const Variability& model, std::int32_t stage,
                        std::int32_t first_slow_stage) const;

  std::size_t index(const Task& task) const {
    return (static_cast<std::size_t>(task.kind) * num_stages_ + task.stage) * num_microbatches_ +
           task.microbatch;
  }

  std::int32_t num_stages_;
  std::int32_t num_microbatches_;
  std::vector<std::int64_t> durations_ns_;
  std::vector<std::int64_t> latencies_ns_;
  std::vector<double> costs_;
};

// Short ones first and last, long ones in the middle.
std::vector<std::int32_t> mid_order(const std::vector<double>& costs);

}  // namespace rrfp::sim
