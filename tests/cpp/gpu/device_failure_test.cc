// Device messages when something goes wrong: abort at every stage, peers that die.
#include "base/clock.hpp"
#include "gpu/device_rank.hpp"

namespace rrfp::test {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::int64_t kBoundMs = 20000;

const Status kStageFailed{StatusCode::kStageFailed, 0, "a stage failed"};

void die() { kill(getpid(), SIGKILL); }

bool device_works(DeviceRank& rank) {
  auto send = rank.make_send(kMiB);
  auto* num_wrong = shared_with_device<unsigned long long>();
  auto* words = reinterpret_cast<std::uint32_t*>(send->memory);
  launch_fill(rank.stream(), words, kMiB / 4, 9);
  launch_check(rank.stream(), words, kMiB / 4, 9, num_wrong);
  launch_check(rank.stream(), words, 4, 10, num_wrong);
  require(cudaStreamSynchronize(static_cast<cudaStream_t>(rank.stream())), "synchronize");
  return *num_wrong == 4;
}

// One message not granted, one not computed, one that could have been copied: all end.
void abort_all(RankContext& context) {
  DeviceRank rank(context);
  if (context.rank == 1) {
    rank.answers_headers = false;
    context.meet("ready");
    context.meet("aborted");
    rank.transport().abort(kStageFailed);
    for (const auto& [ticket, header] : rank.kept_headers) rank.answer(ticket, header, {});
    context.meet("done");
    return;
  }
  context.meet("ready");
  std::vector<std::unique_ptr<TestSend>> sends;
  for (int i = 0; i < 3; ++i) {
    sends.push_back(rank.make_send(kMiB));
    rank.post(1, *sends.back(), {kMiB}, 1, i == 1 ? 200000 : 0);
  }
  rank.transport().abort(kStageFailed);
  rank.transport().abort({StatusCode::kClosed, 0, "a later abort does not count"});
  for (const auto& send : sends) {
    CHECK(rank.wait_ended(*send, kBoundMs));
    CHECK(send->status.code == StatusCode::kStageFailed || send->status.ok());
  }
  auto late = rank.make_send(4096);
  rank.post(1, *late, {4096}, 1, 0);
  CHECK(rank.wait_ended(*late, kBoundMs));
  CHECK(late->status.code == StatusCode::kStageFailed);
  CHECK(device_works(rank));
  context.meet("aborted");
  context.meet("done");
}

// Where a message comes before its payload: its reader, enqueued behind the wait for it.
void enqueue_reader(DeviceRank& rank) {
  if (channel_name() != "ipc" || !follows_streams()) return;
  InboundMessage* message = rank.wait_arrived();
  CHECK(message != nullptr && !word_reached(message->arrived));
  if (message != nullptr) rank.check_and_release(message);
}

// Rank 0 waits for a payload that is granted and will never be computed in time.
void abort_while_receiving(RankContext& context) {
  DeviceRank rank(context);
  if (context.rank == 1) {
    auto send = rank.make_send(kMiB);
    rank.post(0, *send, {kMiB}, 1, 400000);
    context.meet("aborted");
    rank.transport().abort(kStageFailed);
    CHECK(rank.wait_ended(*send, kBoundMs));
    return;
  }
  const std::int64_t deadline_ns = steady_now_ns() + 10'000'000'000;
  while (rank.num_headers() == 0 && steady_now_ns() < deadline_ns) std::this_thread::yield();
  enqueue_reader(rank);
  rank.transport().abort(kStageFailed);
  CHECK(rank.wait_arrived(50) == nullptr);
  CHECK(device_works(rank));
  context.meet("aborted");
}

void lose_peer(DeviceRank& rank, std::vector<std::unique_ptr<TestSend>>& sends) {
  CHECK(rank.wait_lost(kBoundMs));
  CHECK(rank.lost_status().code == StatusCode::kPeerLost);
  for (const auto& send : sends) CHECK(rank.wait_ended(*send, kBoundMs));
  CHECK(device_works(rank));
}

void peer_dies_idle(RankContext& context) {
  DeviceRank rank(context);
  context.meet("ready");
  if (context.rank == 1) die();
  std::vector<std::unique_ptr<TestSend>> sends;
  lose_peer(rank, sends);
}

// Large messages both ways, and the peer dies among them.
void peer_dies_busy(RankContext& context) {
  DeviceRank rank(context, 256 * kMiB);
  std::vector<std::unique_ptr<TestSend>> sends;
  for (int i = 0; i < 8; ++i) {
    sends.push_back(rank.make_send(64 * kMiB));
    rank.post(1 - context.rank, *sends.back(), {64 * kMiB}, 1, i == 7 ? 100000 : 0);
  }
  if (context.rank == 1) {
    rank.wait_arrived();
    die();
  }
  lose_peer(rank, sends);
}

// The sender dies after its message was granted and before it was computed: this is where a
// receive of NCCL's, or a stream that waits for the message, could spin for ever.
void sender_dies_before_computed(RankContext& context) {
  DeviceRank rank(context);
  std::vector<std::unique_ptr<TestSend>> sends;
  if (context.rank == 1) {
    sends.push_back(rank.make_send(kMiB));
    rank.post(0, *sends.back(), {kMiB}, 1, 500000);
    context.meet("posted");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    die();
  }
  context.meet("posted");
  enqueue_reader(rank);
  CHECK(rank.wait_lost(kBoundMs));
  rank.transport().release_streams();  // as a runtime does that has given up
  lose_peer(rank, sends);
  CHECK(rank.wait_arrived(0) == nullptr);
}

// The progress thread of rank 0 is held up while a stream waits for a message that never comes.
// Would catch a rank that hangs because nobody is left to free its stream.
void progress_is_held_up(RankContext& context) {
  DeviceRank rank(context, 8 << 20, context.rank == 0 ? 300 : DeviceTransport::kHeldUpMs);
  auto send = rank.make_send(kMiB);
  auto second = rank.make_send(kMiB);
  if (context.rank == 1) {
    rank.post(0, *send, {kMiB}, 1, 3000000);
    context.meet("promised");
    rank.post(0, *second, {kMiB}, 1, 0);
    context.meet("done");
    CHECK(rank.wait_ended(*send, kBoundMs));
    CHECK(rank.wait_ended(*second, kBoundMs));
    return;
  }
  enqueue_reader(rank);
  rank.is_held_up = true;
  context.meet("promised");
  CHECK(rank.wait_lost(kBoundMs));
  CHECK(rank.lost_status().code == StatusCode::kDeviceFailed);
  CHECK(device_works(rank));
  rank.is_held_up = false;
  context.meet("done");
}

// One rank closes while the other still has a message for it: that one ends too.
void peer_closes(RankContext& context) {
  auto rank = std::make_unique<DeviceRank>(context);
  if (context.rank == 1) {
    rank->answers_headers = false;
    context.meet("ready");
    rank.reset();
    return;
  }
  auto send = rank->make_send(kMiB);
  rank->post(1, *send, {kMiB}, 1, 0);
  context.meet("ready");
  CHECK(rank->wait_ended(*send, kBoundMs));
  CHECK(!send->status.ok());
}

TEST_CASE(abort_ends_every_post) { run_ranks(2, abort_all); }
TEST_CASE(abort_ends_a_receive) { run_ranks(2, abort_while_receiving); }
TEST_CASE(peer_killed_when_idle) { run_ranks(2, peer_dies_idle, 1); }
TEST_CASE(peer_killed_among_copies) { run_ranks(2, peer_dies_busy, 1); }
TEST_CASE(sender_killed_before_it_computed) { run_ranks(2, sender_dies_before_computed, 1); }
TEST_CASE(progress_that_is_held_up_is_given_up) { run_ranks(2, progress_is_held_up); }
TEST_CASE(peer_that_closes_ends_posts) { run_ranks(2, peer_closes); }

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_on_devices(argc, argv); }
