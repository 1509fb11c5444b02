// When RankRuntime gives out a task whose message is still on its way to the device.
#include <array>
#include <thread>

#include "check.hpp"
#include "tiny_pipeline.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

constexpr std::int64_t kNoStall = 60000;

// Of rank 1 in a chain of two; carries nothing, and owes what the test says.
class IdleTransport final : public Transport {
 public:
  const char* name() const override { return "idle"; }
  std::int32_t rank() const override { return 1; }
  std::int32_t num_ranks() const override { return 2; }
  bool shares_address_space() const override { return false; }
  void set_sink(MessageSink* sink) override { sink_ = sink; }
  void post_send(std::int32_t, OutboundMessage* message) override {
    sink_->on_sent(message, Status{});
  }
  void post_recv(RecvTicket, InboundMessage*) override {}
  std::size_t progress(std::int64_t) override { return 0; }
  void abort(const Status&) override {}
  int wait_fd() const override { return -1; }
  bool owes_sends() const override { return owes; }
  void release_streams() override { has_released = true; }

  std::atomic<bool> owes{false};
  std::atomic<bool> has_released{false};

 private:
  MessageSink* sink_ = nullptr;
};

struct Rank {
  explicit Rank(const char* hint, std::int32_t slack)
      : transport(new IdleTransport),
        runtime(std::unique_ptr<Transport>(transport), RuntimeOptions{.is_driven = true}) {
    runtime.begin_step(make_plan(2, kNumMicrobatches, hint, slack), 0, kNoStall);
  }

  // The output of stage 0 for 1F<microbatch>: it has its place, and words[microbatch] says when
  // it is there.
  void promise(std::int32_t microbatch) {
    InboundMessage& message = messages[static_cast<std::size_t>(microbatch)];
    message.header.source_rank = 0;
    message.header.source_stage = 0;
    message.header.target_stage = 1;
    message.header.microbatch = microbatch;
    message.header.kind = TaskKind::kForward;
    message.arrived = {&words[static_cast<std::size_t>(microbatch)], 1};
    message.release = [](InboundMessage*) {};
    runtime.on_message(0, &message);
  }
  void arrive(std::int32_t microbatch) {
    reach_word(messages[static_cast<std::size_t>(microbatch)].arrived);
    runtime.on_arrived();
  }
  // The task that may be launched now; "" for none.
  std::string next(std::int64_t timeout_ms = 0) {
    const ClaimResult result = runtime.claim(timeout_ms);
    if (result.outcome != ClaimOutcome::kTask) return "";
    runtime.take_inputs(result.local);
    runtime.retire(result.local);
    return to_text(runtime.engine().table().task(result.local));
  }

  static constexpr std::int32_t kNumMicrobatches = 4;
  std::array<InboundMessage, kNumMicrobatches> messages;
  std::array<std::uint32_t, kNumMicrobatches> words{};
  IdleTransport* transport;
  RankRuntime runtime;
};

}  // namespace

TEST_CASE(a_fixed_order_is_launched_ahead_of_its_messages) {
  Rank rank("1f1b", 0);
  rank.promise(1);
  CHECK(rank.next() == "");  // 1F0 comes first, and nothing is known of it
  rank.promise(0);
  CHECK(rank.next() == "1F0");
  CHECK(rank.next() == "1B0");
  CHECK(rank.next() == "1F1");
  CHECK(rank.words[0] == 0 && rank.words[1] == 0);
}

// Would catch ranks that wait for one another in a circle.
TEST_CASE(nothing_is_launched_ahead_while_something_is_owed) {
  Rank rank("1f1b", 0);
  rank.transport->owes = true;
  rank.promise(0);
  CHECK(rank.next() == "");
  rank.arrive(0);
  CHECK(rank.next() == "1F0");
  CHECK(rank.next() == "1B0");
  rank.promise(1);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    rank.transport->owes = false;
  });
  CHECK(rank.next(30000) == "1F1");
  later.join();
}

TEST_CASE(a_free_choice_waits_for_what_arrives) {
  Rank rank("bf", kUnlimited);
  std::uint32_t end = 0;
  rank.runtime.launched({&end, 1});
  rank.promise(0);
  CHECK(rank.next() == "");  // the device is busy: what arrives first runs first
  rank.promise(1);
  reach_word({&end, 1});
  CHECK(rank.next() == "");  // nobody knows which of the two comes first
  rank.arrive(1);
  CHECK(rank.next() == "1F1");
  CHECK(rank.next() == "1B1");
  CHECK(rank.next() == "1F0");  // alone on its way, and the device has nothing to do
}

TEST_CASE(what_is_still_promised_comes_back_after_an_abort) {
  Rank rank("bf", kUnlimited);
  rank.promise(0);
  rank.promise(1);
  rank.runtime.abort({StatusCode::kStageFailed, 1, "on purpose"});
  CHECK(rank.transport->has_released);
  CHECK(rank.runtime.claim(0).outcome == ClaimOutcome::kAborted);
  CHECK(rank.runtime.drain().size() == 2);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
