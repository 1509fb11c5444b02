// Device messages between processes: contents, order of compute and copy, reuse of memory.
#include <random>

#include "base/clock.hpp"
#include "gpu/device_rank.hpp"

namespace rrfp::test {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

void exchange_sizes(RankContext& context) {
  DeviceRank rank(context);
  const int peer = 1 - context.rank;
  const std::vector<std::vector<std::uint64_t>> messages = {
      {4}, {}, {0}, {64}, {60, 0, 4}, {4096, 100}, {65536}, {kMiB, 12, kMiB}, {32 * kMiB}, {8}};
  std::vector<std::unique_ptr<TestSend>> sends;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    sends.push_back(rank.make_send(33 * kMiB));
    rank.post(peer, *sends[i], messages[i], static_cast<std::uint32_t>(100 * i), 0);
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    InboundMessage* message = rank.wait_arrived();
    CHECK(message != nullptr);
    if (message == nullptr) return;
    const auto number = static_cast<std::size_t>(message->header.microbatch) / 100;
    CHECK(message->header.num_tensors == messages[number].size());
    CHECK(message->header.source_rank == peer);
    CHECK(message->device_index == rank.device());
    rank.check_and_release(message);
  }
  for (const auto& send : sends) {
    CHECK(rank.wait_ended(*send));
    CHECK(send->status.ok());
  }
  CHECK(rank.num_wrong() == 0);
  context.meet("done");
}

// Would catch a copy issued before the payload is computed, and a header held back until then.
void announce_before_computed(RankContext& context) {
  DeviceRank rank(context);
  if (context.rank == 0) {
    auto send = rank.make_send(kMiB);
    rank.post(1, *send, {kMiB}, 5, 300000);
    CHECK(rank.wait_ended(*send));
  } else {
    const std::int64_t deadline_ns = steady_now_ns() + 10'000'000'000;
    while (rank.num_headers() == 0 && steady_now_ns() < deadline_ns) std::this_thread::yield();
    InboundMessage* message = rank.wait_arrived(100);
    if (message != nullptr) CHECK(!word_reached(message->arrived));
    if (message == nullptr) message = rank.wait_arrived();
    CHECK(message != nullptr);
    if (message != nullptr) rank.check_and_release(message);
    CHECK(rank.num_wrong() == 0);
  }
  context.meet("done");
}

// Random sizes, delays of compute on both sides, several messages under way in both
// directions, given back out of order; payloads are poisoned as they are given back. Would
// catch a slot used again while it is read, and memory that grows with the messages.
void soak(RankContext& context) {
  DeviceRank rank(context);
  const char* wanted = std::getenv("RRFP_TEST_MESSAGES");
  const int num_messages = wanted == nullptr ? 300 : std::atoi(wanted);
  constexpr int kAhead = 6;
  std::mt19937_64 random(seed() + static_cast<std::uint64_t>(context.rank));
  const int peer = (context.rank + 1) % context.num_ranks;
  std::vector<std::unique_ptr<TestSend>> sends;
  for (int i = 0; i < kAhead; ++i) sends.push_back(rank.make_send(4 * kMiB));
  std::vector<InboundMessage*> held;
  std::uint64_t reserved_bytes = 0;
  int num_sent = 0;
  int num_received = 0;
  while (num_sent < num_messages || num_received < num_messages) {
    if (num_sent < num_messages) {
      TestSend& send = *sends[static_cast<std::size_t>(num_sent % kAhead)];
      if (num_sent >= kAhead) CHECK(rank.wait_ended(send));
      if (num_sent >= kAhead) CHECK(send.status.ok());
      std::vector<std::uint64_t> sizes(1 + random() % 3);
      for (auto& bytes : sizes) bytes = 4 * (random() % (1 << (random() % 19)));
      rank.post(peer, send, sizes, static_cast<std::uint32_t>(10 * num_sent),
                random() % 4 == 0 ? static_cast<std::int64_t>(random() % 300) : 0);
      ++num_sent;
    }
    const bool must_receive = num_sent - num_received > kAhead || num_sent == num_messages;
    InboundMessage* message =
        num_received < num_messages ? rank.wait_arrived(must_receive ? 30000 : 0) : nullptr;
    if (message == nullptr && must_receive) throw std::runtime_error("a message is missing");
    if (message != nullptr) {
      held.push_back(message);
      ++num_received;
    }
    if (held.size() > 3 || num_received == num_messages) {
      const std::size_t which = random() % held.size();
      rank.check_and_release(held[which]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    }
    if (num_received == num_messages / 2) {
      reserved_bytes = rank.transport().memory().reserved_bytes();
    }
  }
  for (InboundMessage* message : held) rank.check_and_release(message);
  for (const auto& send : sends) CHECK(rank.wait_ended(*send));
  CHECK(rank.num_wrong() == 0);
  CHECK(rank.transport().memory().reserved_bytes() <= 2 * reserved_bytes);
  context.meet("done");
}

// More than there are words on an edge, all posted before one is answered.
void many_outstanding(RankContext& context) {
  DeviceRank rank(context, 1 << 20);
  constexpr int kNumMessages = 700;
  std::vector<std::unique_ptr<TestSend>> sends;
  if (context.rank == 0) {
    auto first = rank.make_send(kNumMessages * 256);
    for (int i = 0; i < kNumMessages; ++i) {
      auto send = std::make_unique<TestSend>();
      send->memory = first->memory + 256 * i;
      send->capacity_bytes = 256;
      rank.post(1, *send, {128}, static_cast<std::uint32_t>(i), i == 0 ? 100000 : 0);
      sends.push_back(std::move(send));
    }
    for (const auto& send : sends) CHECK(rank.wait_ended(*send));
  } else {
    std::vector<InboundMessage*> held;
    for (int i = 0; i < kNumMessages; ++i) {
      held.push_back(rank.wait_arrived());
      if (held.back() == nullptr) throw std::runtime_error("a message is missing");
    }
    for (InboundMessage* message : held) rank.check_and_release(message);
    CHECK(rank.num_wrong() == 0);
  }
  context.meet("done");
}

// Host messages and control blobs pass through beside device messages.
void host_messages_pass(RankContext& context) {
  DeviceRank rank(context);
  const int peer = 1 - context.rank;
  auto host_send = std::make_unique<TestSend>();
  host_send->header.type = MessageType::kData;
  rank.transport().post_send(peer, host_send.get());
  auto send = rank.make_send(4096);
  rank.post(peer, *send, {4096}, 3, 0);
  int num_device = 0;
  for (int i = 0; i < 2; ++i) {
    InboundMessage* message = rank.wait_arrived();
    if (message == nullptr) throw std::runtime_error("a message is missing");
    if (message->header.place == MemoryPlace::kDevice) {
      ++num_device;
      rank.check_and_release(message);
    } else {
      message->release(message);
    }
  }
  CHECK(num_device == 1);
  CHECK(rank.wait_ended(*host_send));
  CHECK(rank.wait_ended(*send));
  CHECK(rank.num_wrong() == 0);
  context.meet("done");
}

TEST_CASE(contents_of_every_size) { run_ranks(2, exchange_sizes); }
TEST_CASE(header_comes_before_payload_is_computed) { run_ranks(2, announce_before_computed); }
TEST_CASE(random_messages_two_ranks) { run_ranks(2, soak); }
TEST_CASE(random_messages_three_ranks) { run_ranks(3, soak); }
TEST_CASE(more_messages_than_words) { run_ranks(2, many_outstanding); }
TEST_CASE(host_messages_beside_device_messages) { run_ranks(2, host_messages_pass); }

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_on_devices(argc, argv); }
