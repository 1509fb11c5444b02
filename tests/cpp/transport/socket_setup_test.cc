// connect_sockets among strangers, absent peers and peers of another kind.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <future>

#include "base/clock.hpp"
#include "check.hpp"
#include "comm/socket_address.hpp"
#include "comm/socket_greeting.hpp"
#include "transport/recording_sink.hpp"
#include "transport/socket_group.hpp"

namespace rrfp::test {

// A connection that the test made itself.
struct Caller {
  explicit Caller(const std::string& address)
      : where(parse_address(address)), fd(Descriptor::open([this] {
          return ::socket(where->family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
        })) {
    CHECK(::connect(fd.get(), where->get(), where->length) == 0);
    const timeval limit{20, 0};
    (void)setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  void write(const std::vector<std::byte>& bytes) {
    CHECK(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size()));
  }
  // What comes until the other end closes.
  std::string read_to_end() {
    std::string text;
    char bytes[1024];
    for (ssize_t count; (count = ::recv(fd.get(), bytes, sizeof bytes, 0)) > 0;) {
      text.append(bytes, static_cast<std::size_t>(count));
    }
    return text;
  }
  std::optional<SocketAddress> where;
  Descriptor fd;
};

std::vector<std::byte> hello(std::int32_t rank, std::uint16_t version = kWireVersion,
                             std::uint64_t run = 99, const RunToken& token = test_token()) {
  MessageHeader header;
  header.type = MessageType::kHello;
  header.version = version;
  header.source_rank = rank;
  header.run = run;
  header.metadata_bytes = sizeof token;
  std::vector<std::byte> bytes(kHelloBytes);
  std::memcpy(bytes.data(), &header, sizeof header);
  std::memcpy(bytes.data() + sizeof header, token.data(), token.size());
  return bytes;
}

struct Outcome {
  std::unique_ptr<Transport> transport;
  Status status;
};

std::future<Outcome> join_group(SocketListener& listener, SocketSetup setup) {
  return std::async(std::launch::async, [&listener, setup = std::move(setup)] {
    Outcome outcome;
    outcome.transport = connect_sockets(listener, setup, &outcome.status);
    return outcome;
  });
}

bool has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "\"%s\" lacks \"%s\"\n", text.c_str(), part.c_str());
  return false;
}

TEST_CASE(one_rank_needs_nobody) {
  SocketListener listener;
  Status status;
  const auto transport = connect_sockets(listener, socket_setup(0, {listener.address()}), &status);
  CHECK(status.ok());
  CHECK(transport != nullptr && transport->num_ranks() == 1);
}

// Every kind of stranger, before and while the peers join: the group comes together all the same,
// and no stranger gets a byte.
void strangers_change_nothing(const std::string& host) {
  std::vector<SocketListener> listeners;
  while (listeners.size() < 3) listeners.emplace_back(host, host.empty());
  std::vector<std::string> addresses;
  for (auto& listener : listeners) addresses.push_back(listener.address());
  RunToken other_token = test_token();
  other_token.back() = std::byte{0};
  MessageHeader huge;
  huge.type = MessageType::kHello;
  huge.metadata_bytes = UINT32_MAX;
  std::vector<std::byte> huge_bytes(sizeof huge);
  std::memcpy(huge_bytes.data(), &huge, sizeof huge);
  const std::vector<std::byte> good = hello(1);

  std::vector<Caller> silent, talking;
  for (int i = 0; i < 100; ++i) silent.emplace_back(addresses[0]);
  auto rank_0 = join_group(listeners[0], socket_setup(0, addresses));
  for (int i = 0; i < 100; ++i) silent.emplace_back(addresses[0]);
  for (int i = 0; i < 20; ++i) {
    Caller closes_at_once(addresses[0]);
    talking.emplace_back(addresses[0]);
    talking.back().write(std::vector<std::byte>(3000, std::byte{0x41}));  // garbage
    talking.emplace_back(addresses[0]);
    talking.back().write({good.begin(), good.begin() + 50});              // half a hello
    talking.emplace_back(addresses[0]);
    talking.back().write(huge_bytes);
    talking.emplace_back(addresses[0]);
    talking.back().write(hello(1, kWireVersion, 99, other_token));
    talking.emplace_back(addresses[0]);
    talking.back().write(hello(1, 7, 99, other_token));
  }
  auto rank_2 = join_group(listeners[2], socket_setup(2, addresses));
  auto rank_1 = join_group(listeners[1], socket_setup(1, addresses));
  for (auto* rank : {&rank_0, &rank_1, &rank_2}) {
    const Outcome outcome = rank->get();
    if (!outcome.status.ok()) fail(__FILE__, __LINE__, outcome.status.message);
  }
  for (Caller& caller : talking) CHECK(caller.read_to_end().empty());
  for (Caller& caller : silent) CHECK(caller.read_to_end().empty());
}

TEST_CASE(strangers_at_a_unix_socket) { strangers_change_nothing(""); }
TEST_CASE(strangers_at_a_port) { strangers_change_nothing("127.0.0.1"); }

// Slow greetings over TCP, one byte at a time, in a crowd: a peer whose hello comes a while after
// its connection still gets in.
TEST_CASE(a_late_greeting_has_time) {
  SocketListener listener("127.0.0.1", false);
  auto rank_0 = join_group(listener, socket_setup(0, {listener.address(), "unix:rank-1"}));
  std::vector<Caller> crowd;
  for (int i = 0; i < 30; ++i) crowd.emplace_back(listener.address());
  Caller rank_1(listener.address());
  for (int i = 0; i < 30; ++i) crowd.emplace_back(listener.address());
  const std::vector<std::byte> good = hello(1);
  for (std::size_t i = 0; i < good.size(); ++i) {
    rank_1.write({good[i]});
    crowd[i % crowd.size()].write({std::byte{0x52}});
  }
  std::byte answer[kHelloBytes];
  CHECK(::recv(rank_1.fd.get(), answer, sizeof answer, MSG_WAITALL) == sizeof answer);
  const Outcome outcome = rank_0.get();
  CHECK(outcome.status.ok());
}

// The unguessable name of a Unix socket that nobody here listens at belongs to another host: the
// port is tried, and the error of a peer that is nowhere lists every address.
TEST_CASE(the_next_address_is_tried) {
  SocketListener listeners[2] = {SocketListener("127.0.0.1"), SocketListener("127.0.0.1")};
  const std::string& both = listeners[0].address();
  const std::string elsewhere = "unix:of-another-host" + both.substr(both.find(','));
  auto rank_0 = join_group(listeners[0], socket_setup(0, {both, listeners[1].address()}));
  auto rank_1 = join_group(listeners[1], socket_setup(1, {elsewhere, listeners[1].address()}));
  CHECK(rank_0.get().status.ok());
  CHECK(rank_1.get().status.ok());

  SocketListener alone("127.0.0.1");
  auto setup = socket_setup(1, {"unix:nobody,tcp:127.0.0.1:1", alone.address()});
  setup.timeout_ms = 300;
  Status status;
  CHECK(connect_sockets(alone, setup, &status) == nullptr);
  CHECK(has(status.message, "its Unix socket: connection refused, tcp:127.0.0.1:1: "));
}

// Callers that know the token but do not fit are told why; the group is not disturbed.
TEST_CASE(callers_that_do_not_fit_are_told_why) {
  SocketListener listeners[2];
  const std::vector<std::string> addresses{listeners[0].address(), listeners[1].address()};
  auto setup = socket_setup(0, addresses);
  setup.addresses.push_back("unix:nobody");  // rank 2 never comes: the set-up stays open
  std::atomic<bool> stop{false};
  setup.interrupted = [&] { return stop.load(); };
  auto rank_0 = join_group(listeners[0], setup);
  Caller rank_1(addresses[0]);
  rank_1.write(hello(1));
  std::byte answer[kHelloBytes];
  CHECK(::recv(rank_1.fd.get(), answer, sizeof answer, MSG_WAITALL) == sizeof answer);
  CHECK(std::memcmp(answer, hello(0).data(), sizeof answer) == 0);

  const auto refused = [&](const std::vector<std::byte>& greeting) {
    Caller caller(addresses[0]);
    caller.write(greeting);
    return caller.read_to_end();
  };
  CHECK(has(refused(hello(1)), "rank 1, is connected already: two processes have this rank"));
  CHECK(has(refused(hello(0)), "rank 0, is not one of the ranks 1 to 2"));
  CHECK(has(refused(hello(3)), "rank 3, is not one of the ranks 1 to 2"));
  CHECK(has(refused(hello(-1)), "rank -1, is not one of the ranks 1 to 2"));
  CHECK(has(refused(hello(2, kWireVersion, 98)), "belongs to another pipeline of this run"));
  stop = true;
  const Outcome outcome = rank_0.get();
  CHECK(outcome.transport == nullptr);
  CHECK(outcome.status.code == StatusCode::kInterrupted);
  CHECK(has(outcome.status.message, "rank 2 at unix:nobody: it has not connected"));
  CHECK(has(outcome.status.message, "5 other connections were turned away"));
}

// Catches connections that pile up: of many silent ones only the newest are kept.
TEST_CASE(silent_strangers_are_bounded) {
  SocketListener listener;
  auto setup = socket_setup(0, {listener.address(), "unix:nobody"});
  std::atomic<bool> stop{false};
  setup.interrupted = [&] { return stop.load(); };
  auto rank_0 = join_group(listener, setup);
  std::vector<Caller> silent;
  for (int i = 0; i < 300; ++i) silent.emplace_back(listener.address());
  const auto num_closed = [&] {
    return std::count_if(silent.begin(), silent.end(), [](const Caller& caller) {
      char byte;
      return ::recv(caller.fd.get(), &byte, 1, MSG_DONTWAIT) == 0;
    });
  };
  CHECK(eventually([&] { return num_closed() == 300 - static_cast<int>(kMaxStrangers); }));
  stop = true;
  CHECK(rank_0.get().status.code == StatusCode::kInterrupted);
}

TEST_CASE(another_version_ends_the_setup_on_both_sides) {
  SocketListener listener;
  auto rank_0 = join_group(listener, socket_setup(0, {listener.address(), "unix:nobody"}));
  Caller caller(listener.address());
  caller.write(hello(1, 9));
  CHECK(has(caller.read_to_end(), "rank 1, speaks wire version 9, rank 0 speaks 2"));
  const Outcome outcome = rank_0.get();
  CHECK(outcome.status.code == StatusCode::kProtocol);
  CHECK(has(outcome.status.message, "speaks wire version 9, rank 0 speaks 2"));
  CHECK(listener.sockets().empty());
}

// A lower rank that answers wrongly: the test plays rank 0.
TEST_CASE(answers_are_checked_too) {
  struct Answer {
    std::vector<std::byte> bytes;
    std::string words;
  };
  RunToken other_token{};
  const std::vector<Answer> answers{
      {hello(0, 9), "with wire version 9, but rank 1 expects rank 0"},
      {hello(1), "answered as rank 1 with"},
      {hello(0, kWireVersion, 99, other_token), "it sent the token of another run"},
      {std::vector<std::byte>(64, std::byte{7}), "something other than a greeting of rrfp"},
      {{}, "it closed the connection after 0 bytes of its greeting"}};
  for (const Answer& answer : answers) {
    SocketListener rank_0, listener;
    auto setup = socket_setup(1, {rank_0.address(), listener.address()});
    setup.timeout_ms = 300;
    auto rank_1 = join_group(listener, setup);
    const auto over = [&] { return rank_1.wait_for(std::chrono::seconds(0)) ==
                                   std::future_status::ready; };
    CHECK(eventually([&] {
      const int fd = ::accept4(rank_0.sockets().front().get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) {
        std::byte greeting[kHelloBytes];
        CHECK(::recv(fd, greeting, sizeof greeting, MSG_WAITALL) == sizeof greeting);
        (void)::send(fd, answer.bytes.data(), answer.bytes.size(), MSG_NOSIGNAL);
        ::close(fd);
      }
      return over();
    }));
    const Outcome outcome = rank_1.get();
    CHECK(outcome.transport == nullptr);
    CHECK(has(outcome.status.message, answer.words));
  }
}

TEST_CASE(absent_peers_are_named) {
  SocketListener listener, silent;
  auto setup = socket_setup(2, {"unix:gone", silent.address(), listener.address(), "unix:late"});
  setup.timeout_ms = 300;
  Status status;
  CHECK(connect_sockets(listener, setup, &status) == nullptr);
  CHECK(status.code == StatusCode::kTimedOut);
  CHECK(has(status.message, "rank 2 waited "));  // for how long: more on a crowded core
  CHECK(has(status.message, " s for its peers. Not there: rank 0 at unix:gone: "));
  CHECK(has(status.message, " attempts, the last one: connection refused; rank 1 at "));
  CHECK(has(status.message, silent.address() + ": connected, but it has not answered"));
  CHECK(has(status.message, "rank 3 at unix:late: it has not connected"));
}

TEST_CASE(wrong_arguments_are_refused) {
  SocketListener listener;
  Status status;
  CHECK_THROWS_WITH(connect_sockets(listener, socket_setup(2, {"unix:a", "unix:b"}), &status),
                    "rank 2 is not one of the 2 ranks");
  CHECK_THROWS_WITH(connect_sockets(listener, socket_setup(0, {"unix:a", "tcp:b"}), &status),
                    "\"tcp:b\" is no address of a listener; expected unix:<name>");
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
