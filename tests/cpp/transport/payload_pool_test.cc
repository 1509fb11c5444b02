// PayloadPool on one thread: sizes, recycling, the bound on memory, messages that outlive it.
#include "comm/payload_pool.hpp"

#include <vector>

#include "check.hpp"
#include "transport/test_message.hpp"

namespace rrfp::test {

// Catches a size class that is too small, or too generous, or misaligned.
TEST_CASE(every_size_fits) {
  Random random(seed());
  std::vector<std::uint64_t> sizes{1, 255, 256, 257, 320, 321, 511, 512, 513, 1 << 20,
                                   (1 << 20) + 1};
  for (int i = 0; i < 500; ++i) sizes.push_back(1 + random.below(random.below(4000000) + 1));
  for (const std::uint64_t bytes : sizes) {
    PayloadPool pool;
    InboundMessage* message = pool.acquire(bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(message->payload) % kPayloadAlignment == 0);
    std::memset(message->payload, 0xab, bytes);
    const std::uint64_t reserved = pool.usage().reserved_bytes;
    CHECK(reserved >= bytes);
    CHECK(bytes < 257 || reserved - bytes <= bytes / 4);
    message->release(message);
  }
}

// Catches state of the message before that shows in the next one.
TEST_CASE(a_recycled_message_is_as_new) {
  PayloadPool pool;
  InboundMessage* first = pool.acquire(0);
  CHECK(first->payload == nullptr);
  int something = 0;
  first->metadata.resize(100);
  first->attachment = &something;
  first->payload = reinterpret_cast<std::byte*>(&something);  // as a device transport does
  first->header.step = 5;
  first->release(first);
  InboundMessage* second = pool.acquire(0);
  CHECK(second == first);
  CHECK(second->payload == nullptr && second->attachment == nullptr && second->next == nullptr);
  CHECK(second->metadata.empty() && second->metadata.capacity() >= 100);
  CHECK(second->header.step == 0);
  second->release(second);
  CHECK(pool.acquire(kMaxPayloadBytes + 1) == nullptr);
  CHECK(pool.usage().num_messages == 1);
}

// Catches memory that follows the number of messages, or the number of different sizes.
TEST_CASE(memory_follows_what_is_held_at_once) {
  PayloadPool pool;
  Random random(seed());
  std::vector<InboundMessage*> held;
  for (int i = 0; i < 20000; ++i) {
    held.push_back(pool.acquire(random.below(4 << 20)));
    if (held.size() > 30) {
      const std::size_t at = random.below(held.size());
      held[at]->release(held[at]);
      held[at] = held.back();
      held.pop_back();
    }
    const auto usage = pool.usage();
    CHECK(usage.reserved_bytes <= 2 * usage.peak_live_bytes + PayloadPool::kIdleFloorBytes);
  }
  CHECK(pool.usage().num_messages < 300);
  for (InboundMessage* message : held) message->release(message);
  CHECK(pool.usage().live_bytes == 0);
}

// Catches buffers that are kept although nobody asks for their size any more.
TEST_CASE(buffers_of_sizes_out_of_use_are_given_up) {
  PayloadPool pool;
  constexpr std::uint64_t kHeldBytes = std::uint64_t{200} << 20;
  for (std::uint64_t bytes = 1 << 20; bytes < (40 << 20); bytes = bytes * 9 / 4) {
    std::vector<InboundMessage*> held(kHeldBytes / bytes);
    for (auto& message : held) message = pool.acquire(bytes);
    for (auto& message : held) message->release(message);
  }
  const auto usage = pool.usage();
  CHECK(usage.reserved_bytes <= 2 * usage.peak_live_bytes + PayloadPool::kIdleFloorBytes);
  CHECK(usage.peak_live_bytes <= kHeldBytes * 5 / 4);
}

// Catches a pool that takes the memory of tensors with it.
TEST_CASE(messages_outlive_the_pool) {
  InboundMessage* message = nullptr;
  {
    PayloadPool pool;
    message = pool.acquire(100000);
  }
  std::memset(message->payload, 1, 100000);
  message->release(message);
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
