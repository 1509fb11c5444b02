// The second half of the conformance suite: aborts, goodbyes and losses. Whatever happens, every
// posted message ends, and every buffer comes back.
#pragma once

#include "transport/conformance.hpp"

namespace rrfp::test {

inline const Status kStageFailedHere{StatusCode::kStageFailed, 0, "2F0 failed in a test"};

inline bool all_are(const std::vector<Status>& statuses, const Status& expected) {
  return std::all_of(statuses.begin(), statuses.end(), [&](const Status& status) {
    return status.code == expected.code && status.origin_rank == expected.origin_rank &&
           status.message == expected.message;
  });
}

// Catches a post after the abort that is sent, forgotten, or ends without the reason.
TEST_CASE(abort_while_idle) {
  Group group = make_group(2);
  group[0].transport().abort(kStageFailedHere);
  group[0].transport().abort(Status{StatusCode::kStalled, 1, "a later one, which does not count"});
  CHECK(eventually([&] {
    group[0].send(1, 1, {100});
    return group[0].all_sends_end() && !group[0].sink().record().bad_sends.empty();
  }));
  group[0].send_control(1, MessageType::kControl, {std::byte{1}});
  CHECK(group[0].all_sends_end());
  CHECK(all_are(group[0].sink().record().bad_sends, kStageFailedHere));
}

// Catches sends that wait for ever for a receiver that does not answer.
TEST_CASE(abort_of_a_sender_whose_messages_wait) {
  Group group = make_group(2);
  group[1].sink().hold(0);
  for (int i = 0; i < 20; ++i) group[0].send(1, i, {1 << 20});
  CHECK(eventually([&] { return group[1].sink().num_held() > 0; }));
  group[0].transport().abort(kStageFailedHere);
  CHECK(group[0].all_sends_end());
  CHECK(!group[0].sink().record().bad_sends.empty());
  CHECK(all_are(group[0].sink().record().bad_sends, kStageFailedHere));
  // A late answer must be harmless, and its buffer must come back.
  for (const auto& held : group[1].sink().record().held) group[1].sink().answer(held);
  group[0].leave();
  CHECK(eventually([&] { return group[1].sink().pool().usage().live_bytes == 0; }));
}

// Catches a receiver that keeps buffers, or is entered again, after its abort.
TEST_CASE(abort_of_a_receiver) {
  Group group = make_group(2);
  group[1].sink().hold(0);
  group[0].send(1, 1, {std::uint64_t{8} << 20});
  CHECK(eventually([&] { return group[1].sink().num_held() == 1; }));
  group[1].transport().abort(kStageFailedHere);
  group[1].send_control(0, MessageType::kControl);
  CHECK(group[1].all_sends_end());
  group[1].sink().answer(group[1].sink().record().held.at(0));
  group[0].send(1, 2, {100});
  CHECK(eventually([&] { return group[1].sink().pool().usage().live_bytes == 0; }));
  group[1].leave();
  CHECK(group[0].all_sends_end());
  CHECK(group[1].sink().num_received() == 0);
  CHECK(group[1].sink().num_held() == 1);
}

// Catches a message that begins to wait for its buffer just when the abort looks for such.
TEST_CASE(abort_while_messages_begin_to_wait) {
  for (int round = 0; round < 40; ++round) {
    Group group = make_group(2);
    group[1].sink().hold(0);
    std::thread sender([&] {
      for (int i = 0; i < 300; ++i) group[0].send(1, i, {8});
    });
    while (group[1].sink().num_held() == 0) std::this_thread::yield();
    group[round % 2].transport().abort(kStageFailedHere);
    sender.join();
    if (round % 2 == 1) group[1].leave();
    CHECK(group[0].all_sends_end());
  }
}

// Catches a transport that enters the sink of a rank that has left; the sink is gone by then.
TEST_CASE(no_call_after_the_destructor) {
  for (int round = 0; round < (kUnderTsan ? 15 : 40); ++round) {
    Group group = make_group(3);
    std::vector<std::thread> senders;
    for (std::size_t rank : {1, 2}) {
      senders.emplace_back([&group, rank] {
        for (int i = 0; i < 100; ++i) group[rank].send(0, i, {20000});
      });
    }
    eventually([&] { return group[0].sink().num_received() > 0; });
    group[0].leave();
    for (auto& sender : senders) sender.join();
    for (std::size_t rank : {1, 2}) CHECK(group[rank].all_sends_end());
    CHECK(group[0].sink().num_late_calls() == 0);
  }
}

// Catches any state in which an abort leaves something open: it comes at a random moment of
// heavy traffic, from a thread of its own.
TEST_CASE(abort_under_load) {
  Random random(seed());
  for (int round = 0; round < (kUnderTsan ? 8 : 20); ++round) {
    Group group = make_group(3);
    const std::size_t victim = random.below(3);
    const std::size_t after = random.below(60);
    std::thread abort([&] {
      eventually([&] { return group[victim].sink().num_received() >= after; }, 2);
      group[victim].transport().abort(kStageFailedHere);
    });
    for (int i = 0; i < 300; ++i) {
      const std::size_t from = random.below(3);
      const auto to = static_cast<std::int32_t>((from + 1 + random.below(2)) % 3);
      group[from].send(to, i, {random.below(i % 10 == 0 ? 300000 : 3000)});
    }
    abort.join();
    CHECK(group[victim].all_sends_end());
    for (std::size_t rank = 0; rank < 3; ++rank) {
      if (rank != victim) group[rank].transport().abort(kStageFailedHere);
      CHECK(group[rank].all_sends_end());
      CHECK(group[rank].sink().record().defects.empty());
    }
    for (std::size_t rank = 0; rank < 3; ++rank) group[rank].leave();
    for (std::size_t rank = 0; rank < 3; ++rank) {
      CHECK(group[rank].sink().pool().usage().live_bytes == 0);
    }
  }
}

// Catches an abort that overtakes its own announcement: the peers must hear the reason, even
// with much data before it and the transport destroyed at once.
TEST_CASE(the_abort_message_gets_through) {
  Group group = make_group(3);
  for (int i = 0; i < 40; ++i) group[0].send(1, i, {1 << 20});
  for (const std::int32_t peer : {1, 2}) {
    group[0].send_control(peer, MessageType::kAbort, {std::byte{42}});
  }
  group[0].transport().abort(kStageFailedHere);
  group[0].leave();
  CHECK(group[0].sink().num_sent() == group[0].num_posted());
  for (std::size_t rank : {1, 2}) {
    CHECK(eventually([&] { return group[rank].sink().num_losses() == 1; }));
    const auto record = group[rank].sink().record();
    CHECK(record.controls.size() == 1);
    CHECK(record.controls.at(0).header.type == MessageType::kAbort);
    CHECK(record.controls.at(0).body == std::vector<std::byte>{std::byte{42}});
    CHECK(record.defects.empty());
  }
}

// Catches a goodbye that is lost, overtakes data, or is still reported as a loss. Everything is
// posted before the sender's thread looks at any of it.
TEST_CASE(leaving_with_a_goodbye) {
  Group group = make_group(3);
  group[0].stop();
  for (int i = 0; i < 10; ++i) group[0].send(1, i, {100000});
  group[0].send_control(1, MessageType::kBye);
  group[0].send_control(2, MessageType::kBye);
  group[0].start();
  CHECK(group[0].all_sends_end());
  group[0].leave();
  CHECK(received(group[1], 10));
  CHECK(eventually([&] { return group[1].sink().num_controls() == 1; }));
  CHECK(eventually([&] { return group[2].sink().num_controls() == 1; }));
  CHECK(group[1].sink().record().controls.at(0).header.type == MessageType::kBye);
  // The others go on; posts to the one that left end in words.
  group[1].send(2, 77, {1000});
  CHECK(received(group[2], 1));
  CHECK(eventually([&] {
    group[1].send(0, 1, {10});
    return group[1].all_sends_end() && !group[1].sink().record().bad_sends.empty();
  }));
  CHECK(group[1].sink().record().bad_sends.at(0).code == StatusCode::kClosed);
  CHECK(group[1].sink().record().bad_sends.at(0).message.find("rank 0 has closed") == 0);
  CHECK(group[1].sink().num_losses() == 0);
  CHECK(group[2].sink().num_losses() == 0);
}

// Catches a receiver that lets go of who said goodbye before it has answered what came earlier.
TEST_CASE(a_goodbye_before_the_answers) {
  Group group = make_group(2);
  group[1].sink().hold(0);
  for (int i = 0; i < 3; ++i) group[0].send(1, i, {100000});
  group[0].send_control(1, MessageType::kBye);
  CHECK(eventually([&] { return group[1].sink().num_held() > 0; }));
  // Where messages come one after the other it waits behind the first that is not answered.
  eventually([&] { return group[1].sink().num_controls() == 1; }, 1);
  group[1].sink().hold_no_more();
  std::size_t num_answered = 0;
  CHECK(eventually([&] {
    const auto held = group[1].sink().record().held;
    while (num_answered < held.size()) group[1].sink().answer(held[num_answered++]);
    return group[1].sink().num_received() == 3;
  }));
  CHECK(group[0].all_sends_end());
  CHECK(eventually([&] { return group[1].sink().num_controls() == 1; }));
  CHECK(group[0].sink().record().bad_sends.empty());
  group[0].leave();
  CHECK(group[1].sink().num_losses() == 0);
}

// Catches a vanished rank that nobody notices, or that is reported more than once.
TEST_CASE(leaving_without_a_goodbye) {
  Group group = make_group(3);
  group[1].sink().hold(0);
  group[0].send(1, 1, {1000});
  CHECK(eventually([&] { return group[1].sink().num_held() == 1; }));
  group[0].leave();
  CHECK(eventually([&] { return group[2].sink().num_losses() == 1; }));
  group[1].sink().answer(group[1].sink().record().held.at(0));
  CHECK(eventually([&] { return group[1].sink().num_losses() == 1; }));
  const Status status = group[2].sink().record().losses.at(0).status;
  CHECK(status.code == StatusCode::kPeerLost);
  CHECK(status.origin_rank == 0);
  CHECK(status.message.find("rank 0") != std::string::npos);
  group[1].send(2, 5, {100});
  CHECK(received(group[2], 1));
  CHECK(group[1].sink().num_losses() + group[2].sink().num_losses() == 2);
  CHECK(group[1].sink().pool().usage().live_bytes == 0);
}

}  // namespace rrfp::test
