// The textbook orders: spelled out where they are short, and run through for many sizes.
#include "arbiter/named_orders.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "check.hpp"
#include "runtime/fixed_order.hpp"
#include "runtime/stage_graph.hpp"

namespace rrfp {
namespace {

std::string text_of(const std::vector<Task>& order) {
  std::string text;
  for (const Task& task : order) text += (text.empty() ? "" : " ") + to_text(task);
  return text;
}

MicrobatchOrder given(std::int32_t num_microbatches) {
  MicrobatchOrder order(num_microbatches);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

StageGraph chain(std::int32_t num_ranks, const std::vector<std::int32_t>& rank_of_stage) {
  std::vector<std::pair<std::int32_t, std::int32_t>> edges;
  for (std::size_t s = 1; s < rank_of_stage.size(); ++s) edges.emplace_back(s - 1, s);
  return StageGraph(num_ranks, rank_of_stage, edges, {});
}

StageGraph loop(std::int32_t num_ranks, std::int32_t num_chunks) {
  std::vector<std::int32_t> ranks;
  for (std::int32_t s = 0; s < num_ranks * num_chunks; ++s) ranks.push_back(s % num_ranks);
  return chain(num_ranks, ranks);
}

StageGraph vee(std::int32_t num_ranks) {
  std::vector<std::int32_t> ranks;
  for (std::int32_t s = 0; s < 2 * num_ranks; ++s) {
    ranks.push_back(std::min(s, 2 * num_ranks - 1 - s));
  }
  return chain(num_ranks, ranks);
}

// Each task once, and the ranks do not wait for one another for ever.
void check_runs(const StageGraph& graph, const std::vector<std::vector<Task>>& orders,
                std::size_t tasks_per_microbatch, std::int32_t num_microbatches) {
  CHECK(circle_of_waits(graph, orders) == "");
  for (std::int32_t rank = 0; rank < graph.num_ranks(); ++rank) {
    std::set<std::string> texts;
    for (const Task& task : orders[rank]) {
      CHECK(graph.rank_of(task.stage) == rank);
      texts.insert(to_text(task));
    }
    CHECK(texts.size() == orders[rank].size());
    CHECK(texts.size() == tasks_per_microbatch * graph.stages_of(rank).size() *
                              static_cast<std::size_t>(num_microbatches));
  }
}

TEST_CASE(one_stage_per_rank) {
  CHECK(text_of(gpipe_order({1}, {0, 1, 2})) == "1F0 1F1 1F2 1B0 1B1 1B2");
  CHECK(text_of(gpipe_order({0}, {2, 0, 1})) == "0F2 0F0 0F1 0B2 0B0 0B1");
  CHECK(text_of(one_f_one_b_order(0, 3, {0, 1, 2, 3})) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  CHECK(text_of(one_f_one_b_order(2, 3, {0, 1, 2})) == "2F0 2B0 2F1 2B1 2F2 2B2");
  CHECK(text_of(one_f_one_b_order(0, 2, {3, 1, 0, 2})) == "0F3 0F1 0B3 0F0 0B1 0F2 0B0 0B2");
  CHECK(text_of(one_f_one_b_order(0, 4, {0, 1})) == "0F0 0F1 0B0 0B1");  // fewer than ranks
  CHECK(text_of(one_f_one_b_order(0, 1, {0})) == "0F0 0B0");
  CHECK(text_of(zb_h1_order(0, 2, {0, 1, 2})) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2");
  CHECK(text_of(zb_h1_order(1, 2, {2, 0, 1})) == "1F2 1I2 1F0 1I0 1W2 1F1 1I1 1W0 1W1");
  CHECK(text_of(zb_h1_order(2, 3, {0, 1})) == "2F0 2I0 2F1 2I1 2W0 2W1");
}

// The same as torch's schedules write out (ScheduleInterleaved1F1B, ScheduleZBVZeroBubble).
TEST_CASE(two_stages_per_rank) {
  CHECK(text_of(gpipe_order({0, 2}, {0, 1})) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
  CHECK(text_of(interleaved_order(0, 2, 2, given(4))) ==
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
  CHECK(text_of(interleaved_order(1, 2, 2, given(4))) ==
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
  CHECK(text_of(zbv_order(0, 2, given(3))) ==
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2");
  CHECK(text_of(zbv_order(1, 2, given(3))) ==
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2");
  CHECK(text_of(zbv_order(0, 1, given(2))) == "0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1");
}

TEST_CASE(every_size_runs_through_within_its_peak) {
  for (std::int32_t num_ranks = 1; num_ranks <= 6; ++num_ranks) {
    for (std::int32_t m = 1; m <= 14; ++m) {
      std::vector<std::vector<Task>> orders;
      for (std::int32_t s = 0; s < num_ranks; ++s) {
        orders.push_back(zb_h1_order(s, num_ranks, given(m)));
        CHECK(peak_units(orders.back()) == std::min(num_ranks, m));
        CHECK(peak_units(one_f_one_b_order(s, num_ranks, given(m))) == std::min(num_ranks - s, m));
        CHECK(peak_units(gpipe_order({s}, given(m))) == m);
      }
      check_runs(loop(num_ranks, 1), orders, 3, m);
      for (std::int32_t chunks = 1; chunks <= 3; ++chunks) {
        std::int32_t peak = 0;
        orders.clear();
        for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
          orders.push_back(interleaved_order(rank, num_ranks, chunks, given(m)));
          peak = std::max(peak, peak_units(orders.back()));
        }
        check_runs(loop(num_ranks, chunks), orders, 2, m);
        CHECK(peak == interleaved_peak_units(num_ranks, chunks, m));
        CHECK(peak == peak_units(orders[0]));
        for (auto& order : orders) order = split_order(order);
        check_runs(loop(num_ranks, chunks), orders, 3, m);
      }
      orders.clear();
      for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
        orders.push_back(zbv_order(rank, num_ranks, given(m)));
        CHECK(peak_units(orders.back()) <= 2 * num_ranks);
      }
      check_runs(vee(num_ranks), orders, 3, m);
      for (auto& order : orders) order = merged_order(order);
      check_runs(vee(num_ranks), orders, 2, m);
    }
  }
}

TEST_CASE(split_and_merged_are_inverse) {
  const auto order = one_f_one_b_order(1, 4, given(7));
  CHECK(text_of(split_order(gpipe_order({0}, {1, 0}))) == "0F1 0F0 0I1 0W1 0I0 0W0");
  CHECK(merged_order(split_order(order)) == order);
  CHECK(peak_units(split_order(order)) == peak_units(order));
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
