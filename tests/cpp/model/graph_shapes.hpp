// The small stage graphs whose states are searched in full.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace rrfp::test {

using Edges = std::vector<std::pair<std::int32_t, std::int32_t>>;

struct Shape {
  const char* name;
  std::vector<std::int32_t> rank_of_stage;
  Edges edges;
  std::int32_t most_microbatches;  // of a search that ends in seconds

  std::int32_t num_ranks() const {
    return *std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1;
  }
};

inline Edges chain(std::int32_t num_stages) {
  Edges edges;
  for (std::int32_t s = 0; s + 1 < num_stages; ++s) edges.emplace_back(s, s + 1);
  return edges;
}

inline const Shape kOneStage{"one stage", {0}, {}, 4};
inline const Shape kChainOfTwo{"chain P2", {0, 1}, chain(2), 4};
inline const Shape kChainOfThree{"chain P3", {0, 1, 2}, chain(3), 4};
inline const Shape kChunks{"chunks P1V2", {0, 0}, chain(2), 4};
inline const Shape kLoop{"loop P2V2", {0, 1, 0, 1}, chain(4), 3};
inline const Shape kV{"V P2V2", {0, 1, 1, 0}, chain(4), 3};
inline const Shape kThreeChunks{"chunks P1V3", {0, 0, 0}, chain(3), 4};
inline const Shape kLoopOfThree{"loop P2V3", {0, 1, 0, 1, 0, 1}, chain(6), 2};
inline const Shape kSourcesTogether{"two sources on one rank", {0, 0, 1}, {{0, 2}, {1, 2}}, 3};
inline const Shape kSourcesApart{"two sources on two ranks", {0, 1, 1}, {{0, 2}, {1, 2}}, 3};
inline const Shape kSkip{"skip", {0, 1, 2}, {{0, 1}, {1, 2}, {0, 2}}, 4};
inline const Shape kDiamond{"diamond", {0, 1, 2, 3}, {{0, 1}, {0, 2}, {1, 3}, {2, 3}}, 3};
inline const Shape kFoldedDiamond{
    "diamond P2V2", {0, 1, 1, 0}, {{0, 1}, {0, 2}, {1, 3}, {2, 3}}, 3};
inline const Shape kTwoLosses{"two losses", {0, 1, 0}, {{0, 1}, {0, 2}}, 3};
inline const Shape kDownwards{"edges to lower stages", {0, 1, 0}, {{2, 1}, {1, 0}}, 3};

inline const Shape* const kChains[] = {&kOneStage, &kChainOfTwo, &kChainOfThree, &kChunks,
                                &kLoop,     &kV,          &kThreeChunks,  &kLoopOfThree};
inline const Shape* const kGraphs[] = {&kSourcesTogether, &kSourcesApart, &kSkip,     &kDiamond,
                                &kFoldedDiamond,   &kTwoLosses,    &kDownwards};

}  // namespace rrfp::test
