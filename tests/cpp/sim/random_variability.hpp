// A mixture of the variability models, drawn from a seed, and what is in it by name.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "sim/variability.hpp"

namespace rrfp::test {

inline sim::Variability random_variability(std::uint64_t seed, std::int32_t num_stages) {
  std::mt19937_64 random(seed ^ 0x0ddba11ULL);
  const auto draw = [&](std::int32_t least, std::int32_t most) {
    return std::uniform_int_distribution<std::int32_t>(least, most)(random);
  };
  const std::vector<sim::Variability> jitters = sim::jitters(5.0 * draw(1, 8));
  const std::int32_t level = draw(0, 5);
  sim::Variability model =
      level < static_cast<std::int32_t>(jitters.size()) ? jitters[level] : sim::Variability{};
  if (draw(0, 2) == 0) model.noise_cv = 0.1 * draw(1, 10);
  if (draw(0, 2) == 0) model.length_sigma = 0.25 * draw(1, 4), model.quadratic = 0.1 * draw(0, 5);
  if (draw(0, 3) == 0) {
    model.image_stages = draw(1, num_stages);
    model.image_sigma = 0.5 * draw(1, 2);
  }
  if (draw(0, 2) == 0) {
    model.stall_probability = 0.01 * draw(1, 10);
    model.stall_units = draw(1, 10);
  }
  if (draw(0, 2) == 0) model.last_extra = 0.25 * draw(1, 6), model.first_extra = 0.25 * draw(0, 2);
  if (draw(0, 2) == 0) model.slow_stages = draw(1, num_stages), model.slow_factor = draw(2, 4);
  return model;
}

inline constexpr const char* kEveryPart[] = {
    "jitter J1", "jitter J2", "jitter J3", "noise", "lengths", "images", "stalled messages",
    "uneven stages", "slow stages"};
inline std::vector<std::string> parts_of(const sim::Variability& model) {
  std::vector<std::string> parts;
  if (!model.name.empty()) parts.push_back("jitter " + model.name);
  if (model.noise_cv > 0) parts.emplace_back("noise");
  if (model.length_sigma > 0) parts.emplace_back("lengths");
  if (model.image_stages > 0) parts.emplace_back("images");
  if (model.stall_probability > 0) parts.emplace_back("stalled messages");
  if (model.last_extra > 0) parts.emplace_back("uneven stages");
  if (model.slow_stages > 0) parts.emplace_back("slow stages");
  return parts;
}

}  // namespace rrfp::test
