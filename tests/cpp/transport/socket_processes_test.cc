// Sockets between real processes, some of which are killed, stopped or forked.
#include "check.hpp"
#include "transport/process_group.hpp"

namespace rrfp::test {

constexpr std::uint64_t kLargeBytes = std::uint64_t{32} << 20;

void say_goodbye(Member& member) {
  for (std::int32_t peer = 0; peer < member.transport().num_ranks(); ++peer) {
    if (peer != member.transport().rank()) member.send_control(peer, MessageType::kBye);
  }
  CHECK(member.all_sends_end());
}

bool has_received(Member& member, std::size_t count) {
  return eventually([&] { return member.sink().num_received() == count; });
}

// Rank's share of traffic in which everybody sends `count` messages to everybody.
void exchange(Member& member, int count) {
  const std::int32_t rank = member.transport().rank();
  const std::int32_t num_ranks = member.transport().num_ranks();
  Random random(seed() + static_cast<std::uint64_t>(rank));
  for (int i = 0; i < count; ++i) {
    for (std::int32_t peer = 0; peer < num_ranks; ++peer) {
      if (peer == rank) continue;
      const std::uint64_t bytes = random.below(i % 40 == 0 ? 1000000 : 20000);
      member.send(peer, static_cast<std::uint64_t>(i), {bytes, random.below(100)});
    }
  }
  CHECK(has_received(member, static_cast<std::size_t>(count * (num_ranks - 1))));
  CHECK(member.all_sends_end());
  CHECK(member.sink().record().defects.empty());
  CHECK(member.sink().record().bad_sends.empty());
}

// A rank that waits for the loss of rank 1 and checks what it is told.
void expect_loss_of_rank_1(Member& member) {
  CHECK(eventually([&] { return member.sink().num_losses() > 0; }));
  const auto losses = member.sink().record().losses;
  CHECK(losses.size() == 1);
  CHECK(losses[0].peer == 1);
  CHECK(losses[0].status.code == StatusCode::kPeerLost);
  CHECK(losses[0].status.message.find("lost rank 1: its connection gave \"") !=
        std::string::npos);
  CHECK(eventually([&] {
    member.send(1, 1, {100});
    return member.all_sends_end() && !member.sink().record().bad_sends.empty();
  }));
  CHECK(eventually([&] { return member.sink().pool().usage().live_bytes == 0; }));
}

TEST_CASE(processes_exchange_messages) {
  ProcessGroup group(3, [](auto rank, auto& listener, auto& setup, Board&) {
    join_and(listener, setup, [&](Member& member) {
      exchange(member, 200);
      member.send((rank + 1) % 3, 7777, {kLargeBytes});
      CHECK(has_received(member, 401));
      CHECK(member.sink().record().defects.empty());
      say_goodbye(member);
      // Nobody is lost who said goodbye, however soon it left.
      CHECK(eventually([&] { return member.sink().num_controls() == 2; }));
      CHECK(member.sink().num_losses() == 0);
    });
  });
  for (std::size_t rank = 0; rank < 3; ++rank) CHECK(group.ends_well(rank));
}

TEST_CASE(a_rank_killed_while_idle) {
  ProcessGroup group(3, [](auto rank, auto& listener, auto& setup, Board& board) {
    join_and(listener, setup, [&](Member& member) {
      exchange(member, 3);
      board.marks[rank] = 1;
      if (rank == 1) pause();
      expect_loss_of_rank_1(member);
      // The others are still there for one another.
      member.send(2 - rank, 55, {1000});
      CHECK(has_received(member, 7));
      say_goodbye(member);
    });
  });
  for (std::size_t rank = 0; rank < 3; ++rank) CHECK(group.reached(rank, 1));
  group.signal(1, SIGKILL);
  CHECK(group.ends_well(0));
  CHECK(group.ends_well(2));
}

// The receiver has the header and a part of the payload when the sender dies.
TEST_CASE(a_sender_killed_within_a_payload) {
  ProcessGroup group(2, [](auto rank, auto& listener, auto& setup, Board& board) {
    join_and(listener, setup, [&](Member& member) {
      if (rank == 1) {
        member.send(0, 1, {kLargeBytes});
        pause();
      }
      member.sink().hold(1);
      CHECK(eventually([&] { return member.sink().num_held() == 1; }));
      board.marks[0] = 1;
      CHECK(eventually([&] { return board.go.load(); }));
      member.sink().answer(member.sink().record().held[0]);
      expect_loss_of_rank_1(member);
      const std::string message = member.sink().record().losses[0].status.message;
      CHECK(message.find(" of 33554432 payload bytes of a message") != std::string::npos);
      CHECK(member.sink().num_received() == 0);
    });
  });
  CHECK(group.reached(0, 1));
  group.signal(1, SIGKILL);
  CHECK(!group.ends_well(1));
  group.board().go = true;
  CHECK(group.ends_well(0));
}

TEST_CASE(a_receiver_killed_within_a_payload) {
  ProcessGroup group(2, [](auto rank, auto& listener, auto& setup, Board& board) {
    join_and(listener, setup, [&](Member& member) {
      if (rank == 1) {
        member.sink().hold(0);
        CHECK(eventually([&] { return member.sink().num_held() == 1; }));
        board.marks[1] = 1;
        pause();
      }
      member.send(1, 1, {kLargeBytes});
      member.send(1, 2, {kLargeBytes});
      expect_loss_of_rank_1(member);
      CHECK(member.sink().record().bad_sends.size() >= 2);
    });
  });
  CHECK(group.reached(1, 1));
  group.signal(1, SIGKILL);
  CHECK(group.ends_well(0));
}

// Its address is known, its listener was there, and it never said hello.
TEST_CASE(a_rank_killed_before_its_hello) {
  ProcessGroup group(3, [](auto rank, auto& listener, auto& setup, Board& board) {
    board.marks[rank] = 1;
    if (rank == 1) pause();
    CHECK(eventually([&] { return board.go.load(); }));
    auto hasty = setup;
    hasty.timeout_ms = 500;
    Status status;
    CHECK(connect_sockets(listener, hasty, &status) == nullptr);
    CHECK(status.code == StatusCode::kTimedOut);
    const std::string who = "Not there: rank 1 at " + setup.addresses[1] + ": ";
    CHECK(status.message.find(who) != std::string::npos);
    const char* seen = rank == 0 ? "it has not connected" : "the last one: connection refused";
    CHECK(status.message.find(seen) != std::string::npos);
  });
  for (std::size_t rank = 0; rank < 3; ++rank) CHECK(group.reached(rank, 1));
  group.signal(1, SIGKILL);
  CHECK(!group.ends_well(1));
  group.board().go = true;
  CHECK(group.ends_well(0));
  CHECK(group.ends_well(2));
}

TEST_CASE(a_rank_stopped_for_a_second_is_not_lost) {
  ProcessGroup group(3, [](auto rank, auto& listener, auto& setup, Board& board) {
    join_and(listener, setup, [&](Member& member) {
      board.marks[rank] = 1;
      exchange(member, 300);
      CHECK(member.sink().num_losses() == 0);
      say_goodbye(member);
      CHECK(eventually([&] { return member.sink().num_controls() == 2; }));
    });
  });
  CHECK(group.reached(1, 1));
  group.signal(1, SIGSTOP);
  sleep(1);
  group.signal(1, SIGCONT);
  for (std::size_t rank = 0; rank < 3; ++rank) CHECK(group.ends_well(rank));
}

// A child that the dead rank forked is alive, and must not hold its connections.
TEST_CASE(a_killed_rank_with_a_living_child) {
  ProcessGroup group(2, [](auto rank, auto& listener, auto& setup, Board& board) {
    join_and(listener, setup, [&](Member& member) {
      if (rank == 1) {
        if (fork() == 0) {
          CHECK(process_was_forked());
          board.marks[1] = failures() == 0 ? 1 : 0;
          eventually([&] { return board.go.load(); });
          _exit(0);
        }
        pause();
      }
      expect_loss_of_rank_1(member);
    });
  });
  CHECK(group.reached(1, 1));
  group.signal(1, SIGKILL);
  CHECK(group.ends_well(0));
  group.board().go = true;
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
