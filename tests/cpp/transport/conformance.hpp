// What every transport must do, whatever it is made of. A transport's own test file defines
// setting() and includes this one; its cases run in one process, a rank per thread.
#pragma once

#include <numeric>

#include "check.hpp"
#include "transport/test_group.hpp"

namespace rrfp::test {

struct Setting {
  std::vector<std::unique_ptr<Transport>> (*make_transports)(std::int32_t num_ranks);
  PayloadPlace place;
  std::uint64_t largest_bytes = std::uint64_t{32} << 20;
};
Setting setting();  // the plug-in's

inline Group make_group(std::int32_t num_ranks) {
  return Group(setting().make_transports(num_ranks), setting().place);
}

inline bool received(Member& member, std::size_t count) {
  return eventually([&] { return member.sink().num_received() >= count; });
}

// Everything posted was sent, everything received was right, nobody was lost.
inline void check_clean(Group& group) {
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    CHECK(group[rank].all_sends_end());
    const auto record = group[rank].sink().record();
    for (const std::string& defect : record.defects) fail(__FILE__, __LINE__, defect);
    CHECK(record.bad_sends.empty());
    CHECK(record.losses.empty());
    CHECK(eventually([&] { return group[rank].sink().pool().usage().live_bytes == 0; }));
  }
}

// Catches lost, shifted or repeated bytes at the sizes where buffers, padding and system calls
// have their edges.
TEST_CASE(contents_of_every_size) {
  Group group = make_group(2);
  std::vector<std::uint64_t> sizes{0, 1, 3, 4, 63, 64, 65, 127, 4095, 4096, 4097, 65375, 65376,
                                   65377, 65535, 65536, 65537, 1 << 20, (1 << 20) + 1};
  sizes.push_back(setting().largest_bytes / (kUnderTsan ? 8 : 1));
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    group[0].send(1, 2 * i, {sizes[i]});
    group[1].send(0, 2 * i + 1, {sizes[i]});
  }
  CHECK(received(group[0], sizes.size()));
  CHECK(received(group[1], sizes.size()));
  check_clean(group);
}

// Catches a wrong cursor over many pieces, and pieces without a pointer (None, empty tensors).
TEST_CASE(many_tensors_in_one_message) {
  Group group = make_group(2);
  Random random(seed());
  std::vector<std::uint64_t> sizes;
  for (int i = 0; i < 1000; ++i) sizes.push_back(i % 3 == 0 ? 0 : random.below(700));
  group[0].send(1, 1, sizes);
  group[0].send(1, 2, {});
  group[0].send(1, 3, {0, 0, 0});
  group[0].send(1, 4, {0, 5, 0, 100000, 0});
  CHECK(received(group[1], 4));
  check_clean(group);
}

// Catches controls that are reordered among themselves, cut, or delivered as data.
TEST_CASE(control_messages_keep_their_order) {
  Group group = make_group(3);
  for (int i = 0; i < 50; ++i) {
    group[2].send_control(0, MessageType::kControl, std::vector<std::byte>(i * 37, std::byte(i)));
  }
  group[2].send_control(0, MessageType::kControl,
                        std::vector<std::byte>(kMaxMetadataBytes, std::byte{9}));
  group[2].send_control(1, MessageType::kHeartbeat, {std::byte{1}});
  group[2].send_control(1, MessageType::kAbort, {std::byte{2}, std::byte{3}});
  CHECK(eventually([&] { return group[0].sink().num_controls() == 51; }));
  CHECK(eventually([&] { return group[1].sink().num_controls() == 2; }));
  const auto controls = group[0].sink().record().controls;
  for (std::size_t i = 0; i < 50; ++i) {
    CHECK(controls[i].peer == 2);
    CHECK(controls[i].header.type == MessageType::kControl);
    CHECK(controls[i].body == std::vector<std::byte>(i * 37, std::byte(i)));
  }
  CHECK(controls.back().body.size() == kMaxMetadataBytes);
  CHECK(group[1].sink().record().controls[1].header.type == MessageType::kAbort);
  check_clean(group);
}

// Catches a receiver that must answer in order of arrival, or that lets one peer hold up others.
TEST_CASE(answers_in_any_order_and_from_any_thread) {
  Group group = make_group(3);
  group[0].sink().hold(1);
  group[0].sink().hold(2);
  group[1].send(0, 11, {1000, 70000});
  group[2].send(0, 22, {50});
  CHECK(eventually([&] { return group[0].sink().num_held() == 2; }));
  group[0].sink().hold_no_more();
  auto held = group[0].sink().record().held;
  if (held[0].ticket.peer == 1) std::swap(held[0], held[1]);
  std::thread([&] { group[0].sink().answer(held[0]); }).join();
  for (int i = 0; i < 100; ++i) group[2].send(0, 100 + i, {64});
  CHECK(received(group[0], 101));
  CHECK(group[0].sink().record().seeds.front() == 22);
  group[0].sink().answer(held[1]);
  CHECK(received(group[0], 102));
  CHECK(group[0].sink().record().seeds.back() == 11);
  check_clean(group);
}

// Catches races of producers: a lost, doubled or mixed-up message.
TEST_CASE(many_producers) {
  Group group = make_group(3);
  constexpr int kThreads = 4, kMessages = 100;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3 * kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      Random random(seed() + static_cast<std::uint64_t>(thread));
      const std::size_t from = static_cast<std::size_t>(thread % 3);
      for (int i = 0; i < kMessages; ++i) {
        const auto to = static_cast<std::int32_t>((from + 1 + random.below(2)) % 3);
        group[from].send(to, static_cast<std::uint64_t>(thread * kMessages + i),
                         {random.below(3000), random.below(100)});
      }
    });
  }
  for (auto& thread : threads) thread.join();
  constexpr std::size_t kAll = 3 * kThreads * kMessages;
  std::vector<std::uint64_t> seeds;
  CHECK(eventually([&] {
    std::size_t total = 0;
    for (std::size_t rank = 0; rank < 3; ++rank) total += group[rank].sink().num_received();
    return total == kAll;
  }));
  for (std::size_t rank = 0; rank < 3; ++rank) {
    for (const auto one : group[rank].sink().record().seeds) seeds.push_back(one);
  }
  std::sort(seeds.begin(), seeds.end());
  std::vector<std::uint64_t> expected(kAll);
  std::iota(expected.begin(), expected.end(), 0);
  CHECK(seeds == expected);
  check_clean(group);
}

// Catches use of a buffer after it was given back, on either side: both are poisoned. And memory
// that grows with the number of messages.
TEST_CASE(a_thousand_messages_both_ways) {
  Group group = make_group(2);
  Random random(seed());
  std::uint64_t reserved_early = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::size_t from = random.below(2);
    const std::uint64_t bytes = random.below(i % 50 == 0 ? 2000000 : 20000);
    group[from].send(static_cast<std::int32_t>(1 - from), static_cast<std::uint64_t>(i),
                     {bytes, random.below(500)});
    // Few at a time, so that what is held at once does not depend on the run.
    CHECK(eventually([&] {
      return group[0].sink().num_received() + group[1].sink().num_received() + 8 >
             static_cast<std::size_t>(i);
    }));
    if (i == 500) reserved_early = group[0].sink().pool().usage().num_messages;
  }
  CHECK(eventually([&] {
    return group[0].sink().num_received() + group[1].sink().num_received() == 1000;
  }));
  CHECK(group[0].sink().pool().usage().num_messages <= reserved_early + 40);
  check_clean(group);
}

}  // namespace rrfp::test
