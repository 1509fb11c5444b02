// Bytes at random where a peer or a stranger speaks: headers, greetings, streams, and a crowd at
// the port. Whatever comes is refused in words or is what it claims to be; it costs no memory and
// disturbs nobody else.
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <fstream>
#include <future>
#include <random>

#include "comm/header_check.hpp"
#include "comm/socket_address.hpp"
#include "comm/socket_greeting.hpp"
#include "transport/raw_peer.hpp"
#include "transport/socket_group.hpp"

namespace rrfp::test {

using Bytes = std::vector<unsigned char>;

template <class T>
Bytes bytes_of(const T& value) {
  const auto* first = reinterpret_cast<const unsigned char*>(&value);
  return Bytes(first, first + sizeof value);
}

// Flips bits, overwrites, cuts, doubles or adds: a few times each.
Bytes damaged(Bytes bytes, std::mt19937_64& random) {
  for (auto times = 1 + random() % 4; times > 0; --times) {
    const std::size_t at = bytes.empty() ? 0 : random() % bytes.size();
    switch (bytes.empty() ? 4 : random() % 6) {
      case 0: bytes[at] ^= static_cast<unsigned char>(1u << random() % 8); break;
      case 1: bytes[at] = static_cast<unsigned char>(random()); break;
      case 2: bytes.resize(at); break;
      case 3: bytes.insert(bytes.end(), bytes.begin(), bytes.begin() + at); break;
      case 4: bytes.push_back(static_cast<unsigned char>(random())); break;
      default:  // an extreme number in the place of a field
        for (std::size_t i = at / 8 * 8; i < std::min(bytes.size(), at / 8 * 8 + 8); ++i) {
          bytes[i] = random() % 2 == 0 ? 0xff : i % 8 == 7 ? 0x80 : 0x00;
        }
    }
  }
  return bytes;
}

bool is_sound(const MessageHeader& h, const ExpectedHeader& expected) {
  const auto type = static_cast<int>(h.type);
  const bool is_data = h.type == MessageType::kData;
  return h.magic == kMessageMagic && h.version == kWireVersion && h.run == expected.run &&
         h.source_rank == expected.source_rank && h.sequence == expected.sequence && type >= 2 &&
         type <= 10 && static_cast<int>(h.kind) <= 3 && h.metadata_bytes <= 1u << 20 &&
         h.payload_bytes <= std::uint64_t{1} << 40 && h.payload_bytes % 64 == 0 &&
         (is_data ? h.place == MemoryPlace::kHost : h.payload_bytes == 0);
}

TEST_CASE(damaged_headers_are_refused_or_sound) {
  std::mt19937_64 random(seed());
  const ExpectedHeader expected{.run = kRun, .source_rank = 1, .sequence = 1};
  int num_sound = 0;
  for (int i = 0; i < 300000; ++i) {
    MessageHeader header = good_header();
    if (i % 2 == 0) header.type = MessageType::kData;
    Bytes bytes = damaged(bytes_of(header), random);
    bytes.resize(sizeof header);
    std::memcpy(&header, bytes.data(), sizeof header);
    const bool is_taken = header_defect(header, expected).empty();
    num_sound += is_taken;
    if (is_taken != is_sound(header, expected)) {
      return fail(__FILE__, __LINE__, "header " + std::to_string(i) + " of seed " +
                                          std::to_string(seed()));
    }
  }
  CHECK(num_sound > 1000 && num_sound < 200000);
  MessageHeader huge = good_header();
  huge.type = MessageType::kData;
  huge.payload_bytes = std::uint64_t{1} << 63;
  CHECK(header_defect(huge, expected).find("payload_bytes is 9223372036854775808") == 0);
}

// The greeting comes in pieces; what is taken for a hello has the token and the frame of one.
TEST_CASE(damaged_greetings_are_strangers) {
  std::mt19937_64 random(seed());
  const RunToken token = test_token();
  MessageHeader header;
  header.type = MessageType::kHello;
  header.metadata_bytes = sizeof token;
  Bytes good = bytes_of(header);
  const Bytes token_bytes = bytes_of(token);
  good.insert(good.end(), token_bytes.begin(), token_bytes.end());
  int num_hellos = 0;
  for (int i = 0; i < 3000; ++i) {
    const Bytes bytes = i == 0 ? good : damaged(good, random);
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    GreetingReader reader;
    auto outcome = GreetingReader::Outcome::kIncomplete;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t count = std::min<std::size_t>(1 + random() % 90, bytes.size() - at);
      CHECK(::send(pair[0], bytes.data() + at, count, MSG_NOSIGNAL) ==
            static_cast<ssize_t>(count));
      at += count;
      if (outcome == GreetingReader::Outcome::kIncomplete) outcome = reader.read(pair[1], token);
    }
    ::close(pair[0]);
    if (outcome == GreetingReader::Outcome::kIncomplete) outcome = reader.read(pair[1], token);
    CHECK(outcome != GreetingReader::Outcome::kIncomplete);
    const bool has_token = bytes.size() >= kHelloBytes &&
                           std::equal(token_bytes.begin(), token_bytes.end(),
                                      bytes.begin() + sizeof(MessageHeader));
    if (outcome == GreetingReader::Outcome::kHello) {
      ++num_hellos;
      CHECK(has_token && reader.header().magic == kMessageMagic);
    }
    CHECK(outcome != GreetingReader::Outcome::kRefusal || has_token);
    if (i == 0) CHECK(outcome == GreetingReader::Outcome::kHello);
    ::close(pair[1]);
  }
  CHECK(num_hellos > 10 && num_hellos < 2500);
}

// A peer past its greeting that writes damaged messages: its connection ends with words, what it
// claimed is not allocated, and the other peer's messages come (Wire::loss checks that).
TEST_CASE(damaged_streams_end_their_connection_alone) {
  std::mt19937_64 random(seed());
  for (int i = 0; i < 60; ++i) {
    Wire wire;
    Bytes stream;
    for (std::uint32_t sequence = 1; sequence <= 3; ++sequence) {
      MessageHeader header = good_header(sequence);
      header.metadata_bytes = static_cast<std::uint32_t>(random() % 200);
      const Bytes bytes = bytes_of(header);
      stream.insert(stream.end(), bytes.begin(), bytes.end());
      stream.resize(stream.size() + header.metadata_bytes, 7);
    }
    stream = damaged(stream, random);
    wire.write(stream.data(), stream.size());
    wire.raw.close();
    const Status status = wire.loss();
    CHECK(status.code == StatusCode::kProtocol || status.code == StatusCode::kPeerLost);
    CHECK(!status.message.empty());
  }
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// A thousand connections that say nothing, garbage or half a header, while three ranks meet.
TEST_CASE(a_thousand_strangers_at_the_port) {
  rlimit files{};
  CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 8192);
  (void)setrlimit(RLIMIT_NOFILE, &files);
  std::vector<SocketListener> listeners;
  while (listeners.size() < 3) listeners.emplace_back("127.0.0.1", false);
  std::vector<std::string> addresses;
  for (auto& listener : listeners) addresses.push_back(listener.address());
  const auto join = [&](std::int32_t rank) {
    return std::async(std::launch::async, [&, rank] {
      Status status;
      auto transport = connect_sockets(listeners[rank], socket_setup(rank, addresses), &status);
      return status.message;
    });
  };
  [[maybe_unused]] const std::int64_t before = resident_bytes();  // not under a sanitizer
  auto rank_0 = join(0);
  std::vector<Descriptor> strangers;
  const auto where = parse_address(addresses[0]);
  const Bytes garbage(100, 0x41);
  for (int i = 0; i < 1000; ++i) {
    strangers.push_back(Descriptor::open(
        [&] { return ::socket(where->family(), SOCK_STREAM | SOCK_CLOEXEC, 0); }));
    CHECK(::connect(strangers.back().get(), where->get(), where->length) == 0);
    const std::size_t count = i % 3 == 0 ? 0 : i % 3 == 1 ? garbage.size() : 20;
    if (count > 0) (void)::send(strangers.back().get(), garbage.data(), count, MSG_NOSIGNAL);
  }
  auto rank_1 = join(1), rank_2 = join(2);
  for (auto* rank : {&rank_0, &rank_1, &rank_2}) CHECK(rank->get().empty());
#if !defined(__SANITIZE_THREAD__)
  CHECK(resident_bytes() - before < 8 << 20);
#endif
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
