#include "arbiter/named_orders.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace rrfp {

namespace {

constexpr TaskKind kF = TaskKind::kForward;
constexpr TaskKind kB = TaskKind::kBackward;
constexpr TaskKind kI = TaskKind::kInputGrad;
constexpr TaskKind kW = TaskKind::kWeightGrad;

using ChunkAndPlace = std::pair<std::int32_t, std::int32_t>;

// In how many groups of about P, and from which place on.
std::int32_t num_groups(std::int32_t num_ranks, std::int32_t num_microbatches) {
  return std::max(1, num_microbatches / num_ranks);
}

std::int32_t group_start(std::int32_t group, std::int32_t groups, std::int32_t num_microbatches) {
  return static_cast<std::int32_t>(std::int64_t{group} * num_microbatches / groups);
}

// The (chunk, place) of a rank's forwards, in the order of interleaved_order().
std::vector<ChunkAndPlace> grouped_forwards(std::int32_t num_ranks, std::int32_t num_chunks,
                                            std::int32_t num_microbatches) {
  const std::int32_t groups = num_groups(num_ranks, num_microbatches);
  std::vector<ChunkAndPlace> forwards;
  for (std::int32_t group = 0; group < groups; ++group) {
    const std::int32_t end = group_start(group + 1, groups, num_microbatches);
    for (std::int32_t chunk = 0; chunk < num_chunks; ++chunk) {
      for (auto place = group_start(group, groups, num_microbatches); place < end; ++place) {
        forwards.emplace_back(chunk, place);
      }
    }
  }
  return forwards;
}

// The forwards ahead of the first backward of interleaved_order(), less the one just before it:
// a group through all chunks but the last, and two for each rank behind this one.
std::int32_t interleaved_warmup(std::int32_t rank, std::int32_t num_ranks,
                                std::int32_t num_chunks, std::int32_t num_microbatches) {
  const std::int32_t groups = num_groups(num_ranks, num_microbatches);
  const std::int32_t largest_group = (num_microbatches + groups - 1) / groups;
  return std::min((num_chunks - 1) * largest_group + 2 * (num_ranks - 1 - rank),
                  num_chunks * num_microbatches);
}

}  // namespace

std::vector<Task> gpipe_order(const std::vector<std::int32_t>& stages,
                              const MicrobatchOrder& microbatch_order) {
  std::vector<Task> order;
  order.reserve(2 * stages.size() * microbatch_order.size());
  for (const std::int32_t stage : stages) {
    for (const std::int32_t m : microbatch_order) order.push_back({stage, kF, m});
  }
  for (auto stage = stages.rbegin(); stage != stages.rend(); ++stage) {
    for (const std::int32_t m : microbatch_order) order.push_back({*stage, kB, m});
  }
  return order;
}

std::vector<Task> one_f_one_b_order(std::int32_t stage, std::int32_t num_ranks,
                                    const MicrobatchOrder& microbatch_order) {
  // The forwards ahead of the first backward: one for each rank from here to the last.
  const std::size_t ahead =
      std::min(static_cast<std::size_t>(num_ranks - stage), microbatch_order.size());
  std::vector<Task> order;
  order.reserve(2 * microbatch_order.size());
  for (std::size_t place = 0; place < ahead; ++place) {
    order.push_back({stage, kF, microbatch_order[place]});
  }
  for (std::size_t place = 0; place < microbatch_order.size(); ++place) {
    order.push_back({stage, kB, microbatch_order[place]});
    if (place + ahead < microbatch_order.size()) {
      order.push_back({stage, kF, microbatch_order[place + ahead]});
    }
  }
  return order;
}

std::vector<Task> interleaved_order(std::int32_t rank, std::int32_t num_ranks,
                                    std::int32_t num_chunks,
                                    const MicrobatchOrder& microbatch_order) {
  const auto num_microbatches = static_cast<std::int32_t>(microbatch_order.size());
  const auto forwards = grouped_forwards(num_ranks, num_chunks, num_microbatches);
  const std::int32_t warmup = interleaved_warmup(rank, num_ranks, num_chunks, num_microbatches);
  std::vector<Task> order;
  order.reserve(2 * forwards.size());
  // The k-th backward is that of the k-th forward, with the chunks counted from above.
  const auto run = [&](TaskKind kind, std::size_t k) {
    const auto [chunk, place] = forwards[k];
    const std::int32_t counted = kind == kF ? chunk : num_chunks - 1 - chunk;
    order.push_back({counted * num_ranks + rank, kind, microbatch_order[place]});
  };
  for (std::size_t k = 0; k < forwards.size() + warmup; ++k) {
    if (k < forwards.size()) run(kF, k);
    if (k >= static_cast<std::size_t>(warmup)) run(kB, k - warmup);
  }
  return order;
}

std::vector<Task> zb_h1_order(std::int32_t stage, std::int32_t num_ranks,
                              const MicrobatchOrder& microbatch_order) {
  const std::size_t num_microbatches = microbatch_order.size();
  const auto ahead = std::min(static_cast<std::size_t>(num_ranks - stage), num_microbatches);
  const auto delay = static_cast<std::size_t>(stage);
  std::vector<Task> order;
  order.reserve(3 * num_microbatches);
  for (std::size_t place = 0; place < ahead; ++place) {
    order.push_back({stage, kF, microbatch_order[place]});
  }
  // The W comes before the F, which takes the unit that it gives back.
  for (std::size_t place = 0; place < num_microbatches + delay; ++place) {
    if (place < num_microbatches) order.push_back({stage, kI, microbatch_order[place]});
    if (place >= delay) order.push_back({stage, kW, microbatch_order[place - delay]});
    if (place + ahead < num_microbatches) {
      order.push_back({stage, kF, microbatch_order[place + ahead]});
    }
  }
  return order;
}

std::vector<Task> zbv_order(std::int32_t rank, std::int32_t num_ranks,
                            const MicrobatchOrder& microbatch_order) {
  const auto num_microbatches = static_cast<std::int32_t>(microbatch_order.size());
  // The pattern needs 2P - 1 microbatches to fill; those that do not exist are left out.
  const std::int32_t counted = std::max(2 * num_ranks - 1, num_microbatches);
  const std::int32_t stages[2] = {rank, 2 * num_ranks - 1 - rank};
  std::array<std::array<std::int32_t, 2>, kNumTaskKinds> next{};  // by kind and chunk
  std::vector<Task> order;
  order.reserve(6 * microbatch_order.size());
  const auto num_run = [&](TaskKind kind, int chunk) -> std::int32_t& {
    return next[static_cast<std::size_t>(kind)][chunk];
  };
  const auto run = [&](TaskKind kind, int chunk) {
    const std::int32_t place = num_run(kind, chunk)++;
    if (place < num_microbatches) order.push_back({stages[chunk], kind, microbatch_order[place]});
  };
  const auto run_backward = [&](int chunk) { run(kI, chunk), run(kW, chunk); };

  // Warm-up: down the V, until the first microbatch has come back up to this rank.
  for (std::int32_t i = 0; i < 2 * (num_ranks - rank) - 1; ++i) run(kF, 0);
  for (std::int32_t i = 0; i < rank; ++i) run(kF, 1), run(kF, 0);
  for (std::int32_t i = 0; i < num_ranks - rank; ++i) run(kF, 1), run_backward(1);
  while (num_run(kF, 1) < num_run(kF, 0) || num_run(kF, 0) < counted) {
    if (num_run(kF, 0) < counted) run(kF, 0);
    run_backward(0);
    run(kF, 1);
    run_backward(1);
  }
  // Cool-down: first what other ranks wait for, W where this one would wait.
  for (std::int32_t i = 0; i < rank; ++i) run(kI, 0), run(kI, 1);
  for (std::int32_t i = 0; i < num_ranks - rank; ++i) run_backward(0);
  while (num_run(kW, 1) < num_run(kI, 1)) run(kW, 1);
  while (num_run(kW, 0) < num_run(kI, 0)) run(kW, 0);
  return order;
}

std::vector<Task> split_order(const std::vector<Task>& order) {
  std::vector<Task> split;
  for (const Task& task : order) {
    split.push_back(task);
    if (task.kind != kB) continue;
    split.back().kind = kI;
    split.push_back({task.stage, kW, task.microbatch});
  }
  return split;
}

std::vector<Task> merged_order(const std::vector<Task>& order) {
  std::vector<Task> merged;
  std::copy_if(order.begin(), order.end(), std::back_inserter(merged),
               [](const Task& task) { return task.kind != kW; });
  for (Task& task : merged) task.kind = task.kind == kI ? kB : task.kind;
  return merged;
}

std::int32_t peak_units(const std::vector<Task>& order) {
  std::int32_t units = 0;
  std::int32_t peak = 0;
  for (const Task& task : order) {
    if (task.kind == kF) peak = std::max(peak, ++units);
    if (task.kind == kB || task.kind == kW) --units;
  }
  return peak;
}

std::int32_t interleaved_peak_units(std::int32_t num_ranks, std::int32_t num_chunks,
                                    std::int32_t num_microbatches) {
  return std::min(interleaved_warmup(0, num_ranks, num_chunks, num_microbatches) + 1,
                  num_chunks * num_microbatches);
}

}  // namespace rrfp
