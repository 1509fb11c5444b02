// A rank whose peer is the test: it holds the other end of the connection and writes what it likes.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "comm/socket_mesh.hpp"
#include "transport/test_group.hpp"

namespace rrfp::test {

inline constexpr std::uint64_t kRun = 99;

// Rank 0 of three: rank 1 is a raw socket, rank 2 a well-behaved one.
struct Wire {
  Wire() {
    int pairs[3][2];
    for (auto& pair : pairs) {
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
        fail(__FILE__, __LINE__, "socketpair");
      }
    }
    const auto own = [](int fd) { return Descriptor::open([fd] { return fd; }); };
    std::vector<Descriptor> of_rank_0(3), of_rank_2(3);
    of_rank_0[1] = own(pairs[0][0]);
    of_rank_0[2] = own(pairs[1][0]);
    of_rank_2[0] = own(pairs[1][1]);
    of_rank_2[1] = own(pairs[2][0]);
    raw = own(pairs[0][1]);
    other_raw = own(pairs[2][1]);
    std::vector<std::unique_ptr<Transport>> transports;
    transports.push_back(make_socket_mesh(0, kRun, std::move(of_rank_0)));
    transports.push_back(make_socket_mesh(2, kRun, std::move(of_rank_2)));
    group = std::make_unique<Group>(std::move(transports));
  }

  // Until all is written, or the other end has closed.
  void write(const void* bytes, std::size_t count) {
    const auto* from = static_cast<const char*>(bytes);
    CHECK(eventually([&] {
      const ssize_t written = ::send(raw.get(), from, count, MSG_NOSIGNAL);
      if (written < 0) return errno == EPIPE;
      from += written;
      count -= static_cast<std::size_t>(written);
      return count == 0;
    }));
  }
  void write(const MessageHeader& header) { write(&header, sizeof header); }

  // The loss that rank 0 reports for rank 1. Rank 2 must not notice anything.
  Status loss() {
    CHECK(eventually([&] { return rank_0().sink().num_losses() == 1; }));
    rank_2().send(0, 1234, {5000});
    CHECK(eventually([&] { return !rank_0().sink().record().seeds.empty(); }));
    const auto record = rank_0().sink().record();
    CHECK(record.losses.size() == 1);
    CHECK(record.losses[0].peer == 1);
    CHECK(record.seeds == std::vector<std::uint64_t>{1234});
    CHECK(eventually([&] { return rank_0().sink().pool().usage().live_bytes == 0; }));
    return record.losses[0].status;
  }

  Member& rank_0() { return (*group)[0]; }
  Member& rank_2() { return (*group)[1]; }

  Descriptor raw, other_raw;
  std::unique_ptr<Group> group;
};

inline MessageHeader good_header(std::uint32_t sequence = 1) {
  MessageHeader header;
  header.type = MessageType::kControl;
  header.run = kRun;
  header.source_rank = 1;
  header.sequence = sequence;
  return header;
}

}  // namespace rrfp::test
