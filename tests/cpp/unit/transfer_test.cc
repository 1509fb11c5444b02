// A RankRuntime on another host than its peers, with the test as the line between them and a clock
// that the test turns: idle time is split where the peer had computed the input, by its clock.
// Would catch: an offset that is not applied or has the wrong sign, the time of arrival taken for
// that of computing, an unmeasured clock taken for this host's, the first of two inputs taken for
// the later one.
#include <map>
#include <string>

#include "check.hpp"
#include "tiny_pipeline.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

constexpr std::int64_t kMs = 1000000;
std::int64_t now_ns = 0;
std::int64_t read_clock() { return now_ns; }

// Keeps what the runtime sends and the buffers that it gives.
class Line final : public Transport {
 public:
  Line(std::int32_t rank, std::int32_t num_ranks) : rank_(rank), num_ranks_(num_ranks) {}
  const char* name() const override { return "line"; }
  std::int32_t rank() const override { return rank_; }
  std::int32_t num_ranks() const override { return num_ranks_; }
  bool shares_address_space() const override { return false; }
  void set_sink(MessageSink* sink) override { sink_ = sink; }
  void post_send(std::int32_t peer, OutboundMessage* message) override {
    message->peer = peer;
    if (message->header.type == MessageType::kHeartbeat) heartbeats[peer] = message->metadata;
    sink_->on_sent(message, {});
  }
  void post_recv(RecvTicket, InboundMessage* given) override { buffer = given; }
  std::size_t progress(std::int64_t) override { return 0; }
  void abort(const Status&) override {}
  int wait_fd() const override { return -1; }

  std::map<std::int32_t, std::vector<std::byte>> heartbeats;  // the last, by peer
  InboundMessage* buffer = nullptr;

 private:
  const std::int32_t rank_, num_ranks_;
  MessageSink* sink_ = nullptr;
};

// The last rank; each stage before it is on a rank of its own and a source of it, with a clock
// that is `offset_ns` ahead.
struct LastRank {
  LastRank(std::int32_t num_ranks, std::int64_t offset_ns) : offset_ns(offset_ns) {
    now_ns = std::int64_t{3600} * 1000 * kMs;
    auto owned = std::make_unique<Line>(num_ranks - 1, num_ranks);
    line = owned.get();
    rank = std::make_unique<RankRuntime>(
        std::move(owned), RuntimeOptions{.heartbeat_ms = 500, .now_ns = read_clock,
                                         .is_driven = true});
    std::vector<std::int32_t> ranks;
    std::vector<std::pair<std::int32_t, std::int32_t>> edges;
    for (std::int32_t stage = 0; stage < num_ranks; ++stage) {
      ranks.push_back(stage);
      if (stage < num_ranks - 1) edges.emplace_back(stage, num_ranks - 1);
    }
    StepOptions options;
    options.num_microbatches = 1;
    options.hint = "bf";
    options.forward_only = true;
    plan = std::make_shared<StepPlan>(
        std::make_shared<StageGraph>(num_ranks, ranks, edges, std::vector<std::int32_t>{}),
        options);
  }
  ~LastRank() {
    if (line->buffer != nullptr) RankRuntime::release(line->buffer);
    close_rank(*rank);
  }

  // The peer hears a heartbeat 5 ms after it was sent and answers 40 ms later, 5 ms on the way.
  void measure(std::int32_t peer) {
    rank->tick(now_ns);
    const ClockEcho echo =
        *parse_echo(std::span(line->heartbeats.at(peer)).subspan(sizeof(RankState)));
    CHECK(echo.sent_ns == now_ns);
    const std::int64_t heard_ns = now_ns + 5 * kMs + offset_ns;
    now_ns += 50 * kMs;
    std::vector<std::byte> body = to_bytes(RankState{});
    body.resize(body.size() + sizeof echo);
    write_echo({heard_ns + 40 * kMs, echo.sent_ns, heard_ns},
               std::span(body).subspan(sizeof(RankState)));
    MessageHeader header;
    header.type = MessageType::kHeartbeat;
    rank->on_control(peer, header, body);
    now_ns += 500 * kMs;
  }

  void begin() {
    rank->begin_step(plan, 0, 60000);
    begun_ns = now_ns;
    look();
  }
  void look() { CHECK(rank->claim(0).outcome == ClaimOutcome::kTimeout); }
  // The output of `source`, computed and come so long after the beginning.
  void comes(std::int32_t source, std::int64_t computed_ms, std::int64_t come_ms) {
    now_ns = begun_ns + come_ms * kMs;
    MessageHeader header;
    header.source_rank = header.source_stage = source;
    header.target_stage = rank->rank();
    header.microbatch = 0;
    header.computed_us = to_short_us(begun_ns + computed_ms * kMs + offset_ns);
    rank->on_header({source, 0}, header, {});
    rank->on_message(source, std::exchange(line->buffer, nullptr));
  }
  StepTimes end() {
    const ClaimResult claimed = rank->claim(0);
    CHECK(claimed.outcome == ClaimOutcome::kTask);
    for (InboundMessage* input : rank->take_inputs(claimed.local)) RankRuntime::release(input);
    rank->retire(claimed.local);
    CHECK(rank->claim(0).outcome == ClaimOutcome::kDone);
    return rank->end_step();
  }

  const std::int64_t offset_ns;
  Line* line;
  std::unique_ptr<RankRuntime> rank;
  std::shared_ptr<const StepPlan> plan;
  std::int64_t begun_ns = 0;
};

void expect(const StepTimes& times, std::int64_t input_ms, std::int64_t transfer_ms) {
  // A header says microseconds, rounded up.
  const std::int64_t input_ns = times.idle_warmup_ns;  // the step has one task
  CHECK(input_ns >= input_ms * kMs && input_ns < input_ms * kMs + 2000);
  CHECK(input_ns + times.idle_transfer_ns == (input_ms + transfer_ms) * kMs);
  CHECK(times.wall_ns == (input_ms + transfer_ms) * kMs);
}

}  // namespace

TEST_CASE(a_wait_is_split_by_the_clock_of_the_peer) {
  for (const std::int64_t hours : {0, 7, -1}) {  // behind the host that was started last
    LastRank last(2, hours * 3600 * 1000 * kMs + 123456789);
    last.measure(0);
    last.begin();
    last.comes(0, 10, 14);
    const StepTimes times = last.end();
    expect(times, 10, 4);
    CHECK(times.transfer_from_ns == std::vector<std::int64_t>({times.idle_transfer_ns, 0}));
  }
}

TEST_CASE(before_the_clocks_are_measured_nothing_counts_as_transfer) {
  LastRank last(2, 0);
  last.begin();
  last.comes(0, 10, 14);
  expect(last.end(), 14, 0);
}

TEST_CASE(the_input_that_is_computed_last_decides) {
  for (const bool is_first_late : {false, true}) {
    LastRank last(3, 5 * kMs);
    last.measure(0);
    last.measure(1);
    last.begin();
    if (is_first_late) {
      last.comes(1, 18, 20);
      last.look();
      last.comes(0, 10, 30);
    } else {
      last.comes(0, 10, 20);
      last.look();
      last.comes(1, 18, 30);
    }
    const StepTimes times = last.end();
    expect(times, 18, 12);
    CHECK(times.transfer_from_ns[is_first_late ? 0 : 1] == times.idle_transfer_ns);
  }
}

TEST_CASE(what_came_before_the_step_was_not_waited_for) {
  LastRank last(2, 0);
  last.measure(0);
  last.begun_ns = now_ns;
  last.comes(0, 0, 9);  // early: kept until the step begins
  last.rank->begin_step(last.plan, 0, 60000);
  expect(last.end(), 0, 0);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
