// OutboundQueue with a Doorbell, as workers and progress thread use them: more producers than
// cores, a taker that really sleeps. Every message must arrive once, whole, in its producer's
// order, and no ring may be lost (a lost one shows as a time-out). Run under TSan.
#include "comm/outbound_queue.hpp"

#include <poll.h>
#include <sys/epoll.h>

#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "comm/doorbell.hpp"

namespace rrfp::test {

constexpr int kProducers = 6;
constexpr std::uint32_t kRounds = 30;
constexpr std::uint32_t kMessages = 2000;  // of a producer in a round

// The content follows from who and which: written before push() without any other order.
void fill(OutboundMessage* message, int producer, std::uint32_t index) {
  message->peer = producer;
  message->header.step = index;
  message->metadata.assign(16, static_cast<std::byte>(producer + index));
}

bool is_right(const OutboundMessage& message) {
  const auto byte =
      static_cast<std::byte>(message.peer + static_cast<int>(message.header.step));
  return message.metadata == std::vector<std::byte>(16, byte);
}

void run_round(bool slow_producers) {
  OutboundQueue queue;
  Doorbell doorbell;
  const Descriptor epoll = Descriptor::open([] { return epoll_create1(EPOLL_CLOEXEC); });
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  CHECK(epoll_ctl(epoll.get(), EPOLL_CTL_ADD, doorbell.fd(), &event) == 0);

  std::vector<std::vector<OutboundMessage>> messages(kProducers);
  for (auto& of_producer : messages) of_producer = std::vector<OutboundMessage>(kMessages);
  std::vector<std::thread> producers;
  for (int producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&, producer] {
      for (std::uint32_t i = 0; i < kMessages; ++i) {
        OutboundMessage* message = &messages[static_cast<std::size_t>(producer)][i];
        fill(message, producer, i);
        queue.push(message);
        doorbell.ring();
        if (slow_producers && i % 16 == 0) std::this_thread::yield();
      }
    });
  }

  std::vector<std::uint32_t> next(kProducers, 0);
  std::uint32_t taken = 0, sleeps = 0, timeouts = 0;
  while (taken < kProducers * kMessages && timeouts == 0) {
    doorbell.answer();
    OutboundMessage* message = queue.take_all();
    for (; message != nullptr; message = message->next, ++taken) {
      CHECK(is_right(*message));
      CHECK(message->header.step == next[static_cast<std::size_t>(message->peer)]);
      next[static_cast<std::size_t>(message->peer)] = message->header.step + 1;
    }
    if (taken == kProducers * kMessages || !doorbell.try_sleep()) continue;
    ++sleeps;
    epoll_event woken;
    if (epoll_wait(epoll.get(), &woken, 1, 20000) == 0) ++timeouts;
  }
  for (auto& producer : producers) producer.join();
  CHECK(timeouts == 0);
  CHECK(queue.take_all() == nullptr);
  std::printf("  %u messages, %u sleeps\n", taken, sleeps);
}

TEST_CASE(every_message_once_and_in_order) {
  for (std::uint32_t round = 0; round < kRounds; ++round) run_round(round % 2 == 1);
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
