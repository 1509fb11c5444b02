// A peer that breaks the protocol: the test holds the other end of the connection and writes
// what it likes. Each case is one rule of header_check.hpp or of the stream.
#include <sys/socket.h>
#include <unistd.h>

#include "check.hpp"
#include "transport/raw_peer.hpp"

namespace rrfp::test {

void expect_refused(const MessageHeader& header, const std::string& words) {
  Wire wire;
  wire.write(header);
  const Status status = wire.loss();
  CHECK(status.code == StatusCode::kProtocol);
  const std::string& text = status.message;
  if (text.find("rank 0 received a malformed message header from rank 1: " + words) != 0) {
    fail(__FILE__, __LINE__, "other words: " + text + " in place of: " + words);
  }
  // Closed: the raw end reads end-of-file (or what was unread, as a reset).
  char byte;
  CHECK(eventually([&] { return ::read(wire.raw.get(), &byte, 1) == 0 || errno == ECONNRESET; }));
}

template <class Change>
void expect_refused_with(Change change, const std::string& words) {
  MessageHeader header = good_header();
  change(header);
  expect_refused(header, words);
}

TEST_CASE(a_good_header_is_taken) {
  Wire wire;
  wire.write(good_header(1));
  wire.write(good_header(2));
  CHECK(eventually([&] { return wire.rank_0().sink().num_controls() == 2; }));
  CHECK(wire.rank_0().sink().num_losses() == 0);
}

TEST_CASE(foreign_headers) {
  expect_refused_with([](auto& h) { h.magic = 0x12345678; },
                      "magic is 0x12345678, expected 0x50465252");
  expect_refused_with([](auto& h) { h.version = 9; }, "wire version is 9, expected 2");
  expect_refused_with([](auto& h) { h.run = 98; }, "run is 0x62, expected 0x63");
  expect_refused_with([](auto& h) { h.source_rank = 2; }, "source rank is 2, expected 1");
  expect_refused_with([](auto& h) { h.source_rank = -1; }, "source rank is -1, expected 1");
}

TEST_CASE(sequences) {
  expect_refused_with([](auto& h) { h.sequence = 0; }, "sequence is 0, expected 1");
  expect_refused_with([](auto& h) { h.sequence = 2; }, "sequence is 2, expected 1");
  Wire wire;  // the same message twice
  wire.write(good_header(1));
  wire.write(good_header(1));
  CHECK(wire.loss().message.find("sequence is 1, expected 2") != std::string::npos);
}

TEST_CASE(shapes) {
  expect_refused_with([](auto& h) { h.type = MessageType::kHello; }, "message type is 1");
  expect_refused_with([](auto& h) { h.type = static_cast<MessageType>(77); },
                      "message type is 77");
  expect_refused_with([](auto& h) { h.kind = static_cast<TaskKind>(4); }, "task kind is 4");
  expect_refused_with([](auto& h) { h.metadata_bytes = kMaxMetadataBytes + 1; },
                      "metadata_bytes is 1048577, above the limit of 1048576");
  expect_refused_with([](auto& h) { h.payload_bytes = 64; }, "a message of type 3 has a payload");
  const auto as_data = [](auto change) {
    return [change](MessageHeader& h) {
      h.type = MessageType::kData;
      change(h);
    };
  };
  expect_refused_with(as_data([](auto& h) { h.payload_bytes = kMaxPayloadBytes + 64; }),
                      "payload_bytes is 1099511627840, above the limit");
  expect_refused_with(as_data([](auto& h) { h.payload_bytes = 65; }),
                      "payload_bytes is 65, not a multiple of 64");
  expect_refused_with(as_data([](auto& h) { h.place = MemoryPlace::kDevice; }),
                      "the payload lies in device memory");
}

void expect_cut(std::size_t bytes, const std::string& words) {
  Wire wire;
  MessageHeader header = good_header();
  header.type = MessageType::kData;
  header.metadata_bytes = 100;
  header.payload_bytes = 640000;
  std::vector<std::byte> stream(bytes + sizeof header);
  std::memcpy(stream.data(), &header, sizeof header);
  wire.rank_0().send(1, 3, {100});
  wire.write(stream.data(), bytes);
  wire.raw.close();
  const Status status = wire.loss();
  CHECK(status.code == StatusCode::kPeerLost);
  if (status.message.find(words) == std::string::npos) fail(__FILE__, __LINE__, status.message);
  CHECK(wire.rank_0().all_sends_end());
}

TEST_CASE(streams_that_end_in_the_middle) {
  expect_cut(0, "between messages");
  expect_cut(12, "after 12 of 64 header bytes of a message");
  expect_cut(64 + 99, "after 99 of 100 metadata bytes of a message");
  expect_cut(64 + 100, "after 0 of 640000 payload bytes of a message");
  expect_cut(64 + 100 + 100000, "after 100000 of 640000 payload bytes of a message");
}

// A stream is not cut where messages are: it comes in single bytes, or many messages at once.
TEST_CASE(streams_in_pieces) {
  for (const std::size_t piece : {std::size_t{1}, std::size_t{63}, std::size_t{100000}}) {
    Wire wire;
    std::vector<std::byte> stream;
    for (std::uint32_t i = 1; i <= 30; ++i) {
      TestMessage message({}, i, {i * 10, 3});
      MessageHeader header = good_header(i);
      header.type = MessageType::kData;
      header.microbatch = message.header.microbatch;
      header.num_tensors = 2;
      header.metadata_bytes = static_cast<std::uint32_t>(message.metadata.size());
      header.payload_bytes = total_payload_bytes(message);
      const auto* raw = reinterpret_cast<const std::byte*>(&header);
      stream.insert(stream.end(), raw, raw + sizeof header);
      stream.insert(stream.end(), message.metadata.begin(), message.metadata.end());
      for (const Segment& segment : message.segments) {
        stream.insert(stream.end(), segment.data, segment.data + segment.bytes);
        stream.resize(stream.size() + padded_bytes(segment.bytes) - segment.bytes);
      }
    }
    for (std::size_t at = 0; at < stream.size(); at += piece) {
      wire.write(stream.data() + at, std::min(piece, stream.size() - at));
    }
    CHECK(eventually([&] { return wire.rank_0().sink().num_received() == 30; }));
    CHECK(wire.rank_0().sink().record().defects.empty());
  }
}

// The reason for an end is read before the end itself, also when a write finds it first.
TEST_CASE(a_goodbye_before_a_broken_pipe_counts) {
  Wire wire;
  for (int i = 0; i < 20; ++i) wire.rank_0().send(1, i, {1 << 20});  // fills the socket
  MessageHeader bye = good_header(1);
  bye.type = MessageType::kBye;
  wire.write(bye);
  wire.raw.close();
  CHECK(wire.rank_0().all_sends_end());
  CHECK(wire.rank_0().sink().num_losses() == 0);
  CHECK(wire.rank_0().sink().num_controls() == 1);
  for (const Status& status : wire.rank_0().sink().record().bad_sends) {
    CHECK(status.code == StatusCode::kClosed);
  }
}

// A peer that does not read: other peers are served, and an abort ends what is half written.
TEST_CASE(a_peer_that_stops_reading) {
  Wire wire;
  wire.rank_0().send(1, 1, {std::uint64_t{16} << 20});
  wire.rank_0().send(2, 2, {std::uint64_t{16} << 20});
  CHECK(eventually([&] { return wire.rank_2().sink().num_received() == 1; }));
  CHECK(eventually([&] { return wire.rank_0().sink().num_sent() == 1; }));
  wire.rank_0().transport().abort(Status{StatusCode::kStageFailed, 0, "a test"});
  CHECK(wire.rank_0().all_sends_end());
  CHECK(wire.rank_0().sink().record().bad_sends.size() == 1);
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
