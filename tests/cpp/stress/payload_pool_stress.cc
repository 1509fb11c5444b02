// PayloadPool under more threads than cores: messages are taken by some threads and released by
// others, and nobody may see a buffer that somebody else still uses. Run under TSan.
#include "comm/payload_pool.hpp"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "comm/slot_table.hpp"
#include "transport/test_message.hpp"

namespace rrfp::test {

constexpr int kThreads = 6;
constexpr int kOperations = 20000;
constexpr std::size_t kHeld = 64;  // at once, in all

std::uint64_t stamp_bytes(const InboundMessage& message) { return message.header.payload_bytes; }

// The whole buffer carries the message's own number.
void stamp(InboundMessage* message, std::uint64_t bytes, std::uint32_t number) {
  message->header.payload_bytes = bytes;
  message->header.step = number;
  message->metadata.assign(8, static_cast<std::byte>(number));
  if (bytes > 0) std::memset(message->payload, static_cast<int>(number % 251), bytes);
}

bool is_untouched(const InboundMessage& message) {
  if (message.metadata != std::vector<std::byte>(8, static_cast<std::byte>(message.header.step))) {
    return false;
  }
  for (std::uint64_t i = 0; i < stamp_bytes(message); ++i) {
    if (message.payload[i] != static_cast<std::byte>(message.header.step % 251)) return false;
  }
  return true;
}

// A shelf that all threads exchange messages over: what one took, another releases.
TEST_CASE(buffers_have_one_user_at_a_time) {
  std::atomic<InboundMessage*> shelf[kHeld] = {};
  std::atomic<std::uint32_t> num_wrong{0};
  {
    PayloadPool pool;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        Random random(seed() + static_cast<std::uint64_t>(thread));
        for (int i = 0; i < kOperations; ++i) {
          const std::uint64_t bytes = i % 7 == 0 ? 0 : random.below(i % 50 == 0 ? 60000 : 600);
          InboundMessage* message = pool.acquire(bytes);
          stamp(message, bytes, static_cast<std::uint32_t>(thread * kOperations + i));
          InboundMessage* other = shelf[random.below(kHeld)].exchange(message);
          if (other == nullptr) continue;
          if (!is_untouched(*other)) ++num_wrong;
          other->release(other);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    const auto usage = pool.usage();
    CHECK(usage.num_messages < 20 * (kHeld + kThreads));  // not with the 120000 that were taken
    std::printf("  %u records for %d messages\n", usage.num_messages, kThreads * kOperations);
  }
  // The last ones are released by threads that outlive the pool.
  std::vector<std::thread> late;
  for (int thread = 0; thread < kThreads; ++thread) {
    late.emplace_back([&] {
      for (auto& place : shelf) {
        InboundMessage* message = place.exchange(nullptr);
        if (message == nullptr) continue;
        if (!is_untouched(*message)) ++num_wrong;
        message->release(message);
      }
    });
  }
  for (auto& thread : late) thread.join();
  CHECK(num_wrong == 0);
}

// Few slots, always two out at a time and back in another order: what a free list without tags
// gets wrong (the slot on top is the same, the one below is not).
TEST_CASE(slots_have_one_user_at_a_time) {
  struct Slot {
    std::atomic<int> num_users{0};
    int content = 0;  // not atomic: the list alone orders it
  };
  SlotTable<Slot> table;
  SlotTable<Slot>::FreeList list;
  for (int i = 0; i < 4; ++i) table.push(list, table.add());
  std::atomic<int> num_shared{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10 * kOperations; ++i) {
        std::uint32_t taken[2] = {table.pop(list), table.pop(list)};
        for (const std::uint32_t index : taken) {
          if (index == SlotTable<Slot>::kNone) continue;
          if (++table[index].num_users != 1) ++num_shared;
          ++table[index].content;
        }
        for (const std::uint32_t index : taken) {
          if (index == SlotTable<Slot>::kNone) continue;
          --table[index].num_users;
          table.push(list, index);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(num_shared == 0);
  std::uint32_t num_left = 0;
  while (table.pop(list) != SlotTable<Slot>::kNone && num_left < 100) ++num_left;
  CHECK(num_left == 4);
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
