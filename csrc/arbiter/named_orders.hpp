// The textbook orders by name: what one rank of a chain runs, as a list. Places of the step's
// order stand for microbatches: `microbatch_order[p]` is the microbatch at place p.
//
// Each of them can run as it stands (slack 0) with the same name on all ranks, for any number of
// microbatches, also fewer than ranks; tests/cpp/unit/named_orders_test.cc runs them through.
#pragma once

#include <cstdint>
#include <vector>

#include "base/task.hpp"

namespace rrfp {

using MicrobatchOrder = std::vector<std::int32_t>;

// All forwards, chunk by chunk, then all backwards, the highest chunk first.
std::vector<Task> gpipe_order(const std::vector<std::int32_t>& stages,
                              const MicrobatchOrder& microbatch_order);

// One stage per rank. After P - s forwards one backward and one forward in turn.
std::vector<Task> one_f_one_b_order(std::int32_t stage, std::int32_t num_ranks,
                                    const MicrobatchOrder& microbatch_order);

// 1F1B over several stages per rank, stage s on rank s mod P: microbatches pass in groups of
// about P, a group through all chunks of the rank before the next. Groups are equal where their
// number divides the microbatches, else they differ by one.
std::vector<Task> interleaved_order(std::int32_t rank, std::int32_t num_ranks,
                                    std::int32_t num_chunks,
                                    const MicrobatchOrder& microbatch_order);

// ZB-H1: 1F1B with I in the place of B, so that the gradient goes on early, and W put off by s
// microbatches on stage s, which fills the cool-down. Every rank holds up to P units, 1F1B's peak
// on its first rank. With F, I and W of 1 each and no latency the step takes 3M + P - 1: the last
// rank starts at P - 1, works without a gap through F and I of all and W of all but P - 1
// microbatches, and the last gradient passes the other P - 1 ranks, each of which then has P - 1
// or fewer W of its own left.
std::vector<Task> zb_h1_order(std::int32_t stage, std::int32_t num_ranks,
                              const MicrobatchOrder& microbatch_order);

// ZB-V: two stages per rank, s and 2P-1-s, so that the last stage is on the first rank.
std::vector<Task> zbv_order(std::int32_t rank, std::int32_t num_ranks,
                            const MicrobatchOrder& microbatch_order);

// Each B as I and, right after it, W.
std::vector<Task> split_order(const std::vector<Task>& order);

// Each I as B, no W.
std::vector<Task> merged_order(const std::vector<Task>& order);

// The most units in flight at once when a rank's order runs as it stands: taken at F, given back
// at B or W.
std::int32_t peak_units(const std::vector<Task>& order);

// The units that interleaved_order() has in flight at most on its first rank, where it is most.
std::int32_t interleaved_peak_units(std::int32_t num_ranks, std::int32_t num_chunks,
                                    std::int32_t num_microbatches);

}  // namespace rrfp
