// One RankRuntime against a peer that the test plays itself, message by message: duplicates,
// strangers, bad bodies, silence.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "base/check.hpp"
#include "base/clock.hpp"
#include "check.hpp"
#include "runtime/status_body.hpp"
#include "tiny_pipeline.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

// Takes what the runtime sends and says nothing on its own.
class Puppet final : public MessageSink {
 public:
  explicit Puppet(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {
    transport_->set_sink(this);
  }

  void send(MessageType type, const MessageHeader& header, std::vector<std::byte> body = {}) {
    auto* message = new OutboundMessage;
    message->header = header;
    message->header.type = type;
    message->metadata = std::move(body);
    transport_->post_send(0, message);
  }
  void send_heartbeat(const RankState& state) {
    std::vector<std::byte> body = to_bytes(state);
    body.resize(body.size() + sizeof(ClockEcho));
    send(MessageType::kHeartbeat, {}, std::move(body));
  }
  void send_started(const Task& target, std::uint32_t duration_us, std::uint32_t step = 0) {
    MessageHeader header;
    header.step = step;
    header.source_stage = 1;
    header.target_stage = target.stage;
    header.microbatch = target.microbatch;
    header.kind = target.kind;
    header.duration_us = duration_us;
    send(MessageType::kStarted, header);
  }
  void send_forward(std::int32_t microbatch, std::uint32_t step = 0, std::int32_t source = 1,
                    std::int32_t target = 0, TaskKind kind = TaskKind::kBackward) {
    MessageHeader header;
    header.step = step;
    header.source_stage = source;
    header.target_stage = target;
    header.microbatch = microbatch;
    header.kind = kind;
    send(MessageType::kData, header);
  }

  void on_header(RecvTicket ticket, const MessageHeader& header,
                 std::span<const std::byte>) override {
    transport_->post_recv(ticket, pool_.acquire(header.payload_bytes));
  }
  void on_message(std::int32_t, InboundMessage* message) override { PayloadPool::release(message); }
  void on_sent(OutboundMessage* message, const Status&) override { delete message; }
  void on_control(std::int32_t, const MessageHeader& header,
                  std::span<const std::byte> body) override {
    if (header.type == MessageType::kAbort) told = *parse_status(body);
    if (header.type == MessageType::kBye) has_left = true;
    if (header.type == MessageType::kStarted) started.push_back(header);
  }
  void on_peer_lost(std::int32_t, const Status&) override {}

  Status told;
  std::vector<MessageHeader> started;
  bool has_left = false;

 private:
  PayloadPool pool_;
  std::unique_ptr<Transport> transport_;
};

// Rank 0 of two, in step 0 of three microbatches; the puppet is rank 1.
struct Stage {
  explicit Stage(RuntimeOptions options = {},
                 std::shared_ptr<const StepPlan> plan = make_plan(2, 3)) {
    auto transports = make_local_transports(2);
    puppet = std::make_unique<Puppet>(std::move(transports[1]));
    rank = std::make_unique<RankRuntime>(std::move(transports[0]), options);
    rank->begin_step(std::move(plan), 0, 60000);
  }
  ~Stage() { close_rank(*rank); }

  void expect_protocol_error(const std::string& part) {
    CHECK(rank->claim(0).outcome == ClaimOutcome::kAborted);
    const Status status = rank->status();
    CHECK(status.code == StatusCode::kProtocol && status.origin_rank == 0);
    if (status.message.find(part) == std::string::npos) {
      fail(__FILE__, __LINE__, "\"" + part + "\" is not in: " + status.message);
    }
    CHECK(puppet->told.message == status.message);
  }

  std::unique_ptr<Puppet> puppet;
  std::unique_ptr<RankRuntime> rank;
};

}  // namespace

TEST_CASE(a_message_that_comes_twice_is_refused) {
  Stage stage;
  stage.puppet->send_forward(1);
  CHECK(stage.rank->status().ok());
  stage.puppet->send_forward(1);
  stage.expect_protocol_error("the message of stage 1 for 0B1 of step 0 came twice");
}

TEST_CASE(messages_that_fit_no_task_are_refused) {
  for (int variant = 0; variant < 5; ++variant) {
    Stage stage;
    if (variant == 0) stage.puppet->send_forward(3);            // no such microbatch
    if (variant == 1) stage.puppet->send_forward(0, 0, 1, 1);   // another rank's stage
    if (variant == 2) stage.puppet->send_forward(0, 0, 0, 0);   // this rank's own stage as source
    if (variant == 3) stage.puppet->send_forward(0, 0, 7, 0);   // no such stage
    if (variant == 4) {
      stage.puppet->send_forward(0, 0, 1, 0, TaskKind::kForward);  // no such edge
    }
    stage.expect_protocol_error("fits no task of this rank");
  }
}

TEST_CASE(messages_of_other_steps) {
  Stage stage;
  stage.puppet->send_forward(0, 1);  // the next step: kept
  CHECK(stage.rank->status().ok());
  stage.puppet->send_forward(0, 2);
  stage.expect_protocol_error("of step 2 came in step 0");

  Stage over;
  for (std::uint32_t step = 0; step < 3; ++step) {
    if (step > 0) over.rank->begin_step(make_plan(2, 3), step, 60000);
    over.rank->end_step();
  }
  over.puppet->send_forward(0, 2);  // of the step that has just ended
  over.puppet->send_forward(0, 1);
  CHECK(over.rank->num_late() == 2 && over.rank->status().ok());
}

TEST_CASE(bodies_that_cannot_be_read_are_refused) {
  std::vector<std::vector<std::byte>> bodies = {std::vector<std::byte>(5), to_bytes(RankState{})};
  for (const std::size_t more : {sizeof(ClockEcho) - 1, sizeof(ClockEcho) + 1}) {
    bodies.push_back(to_bytes(RankState{}));
    bodies.back().resize(sizeof(RankState) + more);
  }
  bodies.push_back(to_bytes(RankState{}));
  bodies.back().resize(sizeof(RankState) + sizeof(ClockEcho), std::byte{0xff});
  for (const auto& body : bodies) {
    Stage heartbeat;
    heartbeat.puppet->send(MessageType::kHeartbeat, {}, body);
    heartbeat.expect_protocol_error("its heartbeat is malformed");
  }
  Stage abort;
  abort.puppet->send(MessageType::kAbort, {}, std::vector<std::byte>(5));
  abort.expect_protocol_error("its abort is malformed");
}

TEST_CASE(an_abort_of_a_peer_is_taken_over_word_by_word) {
  Stage stage;
  const Status sent{StatusCode::kStageFailed, 1, std::string(100000, 'x')};
  stage.puppet->send(MessageType::kAbort, {}, to_bytes(sent));
  CHECK(stage.rank->claim(1000).outcome == ClaimOutcome::kAborted);
  const Status got = stage.rank->status();
  CHECK(got.code == sent.code && got.origin_rank == 1 && got.message == sent.message);
  CHECK(stage.puppet->told.ok());  // not sent back
  const Status long_one{StatusCode::kStalled, 2, std::string(3 << 20, 'y')};
  CHECK(to_bytes(long_one).size() == kMaxMetadataBytes);
}

// Rank 1 speaks once, then is frozen: rank 0 says so, and what it was doing.
TEST_CASE(a_frozen_peer_is_lost) {
  Stage stage({.heartbeat_ms = 20, .peer_timeout_ms = 200});
  RankState state;
  state.activity = Activity::kRunning;
  state.stage = 1;
  state.microbatch = 3;
  stage.puppet->send_heartbeat(state);
  while (stage.rank->claim(20000).outcome == ClaimOutcome::kTask) {
  }
  CHECK(stage.rank->status().code == StatusCode::kPeerLost);
  CHECK(stage.rank->status().message.find("is inside 1F3") != std::string::npos);
  CHECK(stage.puppet->told.code == StatusCode::kPeerLost);
}

TEST_CASE(a_broken_connection_names_the_last_words) {
  Stage stage;
  RankState state;
  state.activity = Activity::kRunning;
  state.stage = 1;
  state.microbatch = 2;
  stage.puppet->send_heartbeat(state);
  stage.puppet.reset();  // without a goodbye
  CHECK(stage.rank->status().code == StatusCode::kPeerLost);
  CHECK(stage.rank->status().message.find("Rank 1 is inside 1F2") != std::string::npos);
}

TEST_CASE(close_says_goodbye_once) {
  Stage stage;
  stage.rank->close(1000);
  CHECK(stage.puppet->has_left);
  stage.rank->close(1000);
  CHECK_THROWS_WITH(stage.rank->begin_step(make_plan(2, 1), 1, 1000), "has closed its pipeline");
}

TEST_CASE(a_forked_child_refuses_and_leaves_quietly) {
  auto ranks = make_ranks(2);
  const auto plan = make_plan(2, 2);
  on_each(ranks, [&](RankRuntime& rank) { run_step(rank, plan, 0, 60000); });
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a wait for the parent's threads would not end
    try {
      ranks[0]->begin_step(plan, 1, 60000);
      _exit(1);
    } catch (const UserError& error) {
      if (std::string(error.what()).find("was forked") == std::string::npos) _exit(2);
    }
    ranks.clear();
    _exit(0);
  }
  int result = -1;
  waitpid(child, &result, 0);
  CHECK(result == 0);
  on_each(ranks, [&](RankRuntime& rank) {  // the parent goes on
    CHECK(run_step(rank, plan, 1, 60000).outcome == ClaimOutcome::kDone);
  });
  on_each(ranks, close_rank);
}

// Claims, works for a while (or not at all) and retires; the task's text and when it was claimed.
std::pair<std::string, std::int64_t> run_one(RankRuntime& rank, std::int64_t work_ms) {
  const std::int32_t local = rank.claim(20000).local;
  if (local < 0) return {"nothing", 0};
  for (InboundMessage* message : rank.take_inputs(local)) {
    if (message != nullptr) RankRuntime::release(message);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(work_ms));
  rank.retire(local);
  return {to_text(rank.engine().table().task(local)), rank.engine().record(local).claimed_ns};
}

// All forwards take the same time, or none of them would wait for anything.
constexpr std::int64_t kForwardMs = 200;

// Rank 0 says what it starts, once it knows what that takes, and waits for what the hint puts
// first: for 0B0 before 0F4, until it is due and no longer.
TEST_CASE(starts_are_announced_and_announced_tasks_waited_for) {
  StepOptions options;
  options.num_microbatches = 5;
  options.limits = {5, 5};
  Stage stage({}, std::make_shared<StepPlan>(make_chain(2), options));
  CHECK(run_one(*stage.rank, kForwardMs).first == "0F0");
  CHECK(stage.puppet->started.empty());
  CHECK(run_one(*stage.rank, kForwardMs).first == "0F1");
  CHECK(stage.puppet->started.size() == 1);
  const MessageHeader& started = stage.puppet->started.at(0);
  CHECK(started.source_stage == 0 && started.target_stage == 1 && started.microbatch == 1);
  CHECK(started.kind == TaskKind::kForward && started.duration_us >= 1000 * kForwardMs);

  CHECK(run_one(*stage.rank, kForwardMs).first == "0F2");
  CHECK(run_one(*stage.rank, kForwardMs).first == "0F3");
  const Task gradient{0, TaskKind::kBackward, 0};
  const std::int64_t announced_ns = steady_now_ns();
  stage.puppet->send_started(gradient, 30000);  // well within 0.4 of an F
  const auto [text, claimed_ns] = run_one(*stage.rank, 0);
  CHECK(text == "0F4" && claimed_ns - announced_ns >= 30000000);
  CHECK(stage.rank->engine().record(stage.rank->engine().table().local(gradient)).ready_ns == 0);
  stage.puppet->send_started({0, TaskKind::kBackward, 1}, 30000);
  stage.puppet->send_forward(1);
  CHECK(run_one(*stage.rank, 0).first == "0B1");
  CHECK(stage.rank->end_step().idle_slack_ns >= 25000000);
}

// Announcements are only words: what fits nothing, or another step, changes nothing.
TEST_CASE(announcements_that_fit_nothing_are_dropped) {
  Stage stage;
  stage.puppet->send_started({0, TaskKind::kBackward, 7}, 1);
  stage.puppet->send_started({0, TaskKind::kForward, 0}, 1);
  stage.puppet->send_started({1, TaskKind::kBackward, 0}, 1);
  stage.puppet->send_started({0, TaskKind::kBackward, 0}, UINT32_MAX, 5);
  CHECK(run_one(*stage.rank, 0).first == "0F0");
  CHECK(stage.rank->status().ok());
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
