// PeerWatch on a clock of the test's own: silent, busy, stalled and stopped are told apart.
#include "runtime/peer_watch.hpp"

#include <string>

#include "check.hpp"

using namespace rrfp;

namespace {

constexpr std::int64_t kMs = 1000000;
constexpr std::int64_t kPeerTimeoutMs = 5000;
constexpr std::int64_t kStallMs = 1000;
constexpr std::int64_t kBegin = 1000000 * kMs;

RankState state(Activity activity, std::int64_t since_ms) {
  RankState result;
  result.activity = activity;
  result.step = 4;
  result.since_ms = since_ms;
  return result;
}

RankState waiting_for(const char* task, std::int32_t source, std::int64_t since_ms) {
  RankState result = state(Activity::kWaiting, since_ms);
  const Task parsed = *parse_task(task);
  result.stage = parsed.stage;
  result.kind = parsed.kind;
  result.microbatch = parsed.microbatch;
  result.source_stage = result.source_rank = source;
  result.blocked = Blocked::kInput;
  return result;
}

RankState running(const char* task, std::int64_t since_ms) {
  RankState result = waiting_for(task, -1, since_ms);
  result.activity = Activity::kRunning;
  return result;
}

// Rank 0 of three, ticking every 50 ms; the test says what the peers say at each tick.
struct Watched {
  PeerWatch watch{0, 3, kPeerTimeoutMs, kBegin};
  std::int64_t now_ns = kBegin;

  std::optional<Status> tick(const RankState& self) {
    now_ns += 50 * kMs;
    return watch.check(self, kStallMs, now_ns);
  }
  void say(std::int32_t peer, const RankState& state) { watch.heard(peer, state, now_ns); }
};

bool contains(const std::optional<Status>& status, const std::string& part) {
  if (status && status->message.find(part) != std::string::npos) return true;
  std::printf("  \"%s\" is not in: %s\n", part.c_str(), status ? status->message.c_str() : "-");
  return false;
}

}  // namespace

TEST_CASE(a_silent_peer_is_lost_with_its_last_words) {
  Watched world;
  world.say(1, running("1F3", 20));
  std::optional<Status> status;
  int ticks = 0;
  while (!status && ticks < 1000) {
    world.say(2, state(Activity::kOutside, 0));
    status = world.tick(state(Activity::kOutside, 0));
    ++ticks;
  }
  CHECK(status->code == StatusCode::kPeerLost && status->origin_rank == 1);
  CHECK(ticks * 50 == kPeerTimeoutMs);
  CHECK(contains(status, "rank 0 lost rank 1, which is inside 1F3"));
  CHECK(contains(status, "as last heard 5.0 s ago; the most it may be silent is 5.0 s"));
}

TEST_CASE(a_peer_that_said_goodbye_may_be_silent) {
  Watched world;
  world.say(1, state(Activity::kOutside, 0));
  world.watch.said_bye(1);
  for (int ticks = 0; ticks < 1000; ++ticks) {
    world.say(2, state(Activity::kOutside, 0));
    CHECK(!world.tick(state(Activity::kOutside, 0)));
  }
  CHECK(world.watch.has_left(1) && !world.watch.has_left(2));
}

TEST_CASE(the_time_this_process_was_stopped_counts_for_nobody) {
  Watched world;
  world.say(1, waiting_for("1B0", 2, 900));
  world.say(2, waiting_for("2F0", 1, 900));
  world.now_ns += 3600 * 1000 * kMs;  // stopped for an hour
  CHECK(!world.tick(waiting_for("0B0", 1, 3600 * 1000)));
  CHECK(!world.tick(waiting_for("0B0", 1, 3600 * 1000)));
}

TEST_CASE(all_waiting_is_a_stall_that_says_who_waits_for_whom) {
  Watched world;
  std::optional<Status> status;
  std::int64_t waited_ms = 0;
  while (!status && waited_ms < 60000) {
    world.say(1, waiting_for("1B0", 2, waited_ms));
    world.say(2, waiting_for("2F0", 1, waited_ms));
    waited_ms += 50;
    status = world.tick(waiting_for("0B0", 1, waited_ms));
  }
  CHECK(status->code == StatusCode::kStalled && waited_ms >= kStallMs && waited_ms < 2 * kStallMs);
  CHECK(contains(status, "Rank 0 (which says this) waits for 0B0, which lacks the message of stage "
                         "1 (rank 1)"));
  CHECK(contains(status, "Rank 1 waits for 1B0, which lacks the message of stage 2 (rank 2)"));
  CHECK(contains(status, "Rank 2 waits for 2F0, which lacks the message of stage 1 (rank 1)"));
  CHECK(contains(status, "Look at rank 1 first"));
}

TEST_CASE(a_peer_inside_a_task_or_just_out_of_one_is_no_stall) {
  Watched world;
  for (std::int64_t waited_ms = 0; waited_ms < 60000; waited_ms += 50) {
    world.say(1, waiting_for("1B0", 2, waited_ms));
    world.say(2, running("2F0", waited_ms));
    CHECK(!world.tick(waiting_for("0B0", 1, waited_ms)));
  }
  world.say(2, waiting_for("2F1", 1, 0));  // it has just retired 2F0
  for (std::int64_t waited_ms = 0; waited_ms < kStallMs - 50; waited_ms += 50) {
    world.say(1, waiting_for("1B0", 2, 60000 + waited_ms));
    CHECK(!world.tick(waiting_for("0B0", 1, 60000 + waited_ms)));
  }
  world.say(1, waiting_for("1B0", 2, 61000));
  CHECK(world.tick(waiting_for("0B0", 1, 61000)).has_value());
}

TEST_CASE(a_wait_for_tied_gradients_is_one_too) {
  Watched world;
  std::optional<Status> status;
  std::int64_t waited_ms = 0;
  while (!status && waited_ms < 60000) {
    RankState self = state(Activity::kTying, waited_ms);
    self.source_rank = 2;
    world.say(1, state(Activity::kEntering, waited_ms));
    world.say(2, state(Activity::kOutside, waited_ms));
    waited_ms += 50;
    self.since_ms = waited_ms;
    status = world.tick(self);
  }
  CHECK(status->code == StatusCode::kStalled && waited_ms >= kStallMs && waited_ms < 2 * kStallMs);
  CHECK(contains(status, "Rank 0 (which says this) has run its tasks of step 4 and waits for what "
                         "rank 2 adds to the gradients of tied parameters"));
  CHECK(contains(status, "Look at rank 2 first"));
  world.say(2, running("2B0", 0));
  RankState self = state(Activity::kTying, 5000);
  CHECK(!world.tick(self));
}

TEST_CASE(only_a_wait_inside_a_step_is_a_stall) {
  for (const Activity activity : {Activity::kOutside, Activity::kEntering, Activity::kRunning}) {
    Watched world;
    for (std::int64_t ms = 0; ms < 4000; ms += 50) {
      CHECK(!world.tick(state(activity, ms)));
    }
  }
}

TEST_CASE(a_peer_that_did_not_enter_is_named) {
  Watched world;
  std::optional<Status> status;
  RankState late = state(Activity::kOutside, 5000);
  late.step = 3;
  for (std::int64_t waited_ms = 0; !status && waited_ms < 60000; waited_ms += 50) {
    world.say(1, waiting_for("1F0", 0, waited_ms));
    world.say(2, late);
    status = world.tick(waiting_for("0B0", 1, waited_ms));
  }
  CHECK(status->code == StatusCode::kTimedOut);
  CHECK(contains(status, "rank 2 did not enter step 4, which rank 0 has waited in for 1.0 s"));
  CHECK(contains(status, "Rank 2 is outside a step, after step 3"));
}

TEST_CASE(states_survive_the_wire_and_malformed_ones_do_not) {
  const RankState sent = waiting_for("7B31", 8, 123456);
  const auto got = parse_rank_state(to_bytes(sent));
  CHECK(got && to_text(*got) == to_text(sent) && got->step == 4 && got->source_rank == 8);
  std::vector<std::byte> body = to_bytes(sent);
  body[0] = std::byte{9};
  CHECK(!parse_rank_state(body));
  body.pop_back();
  CHECK(!parse_rank_state(body) && !parse_rank_state({}));
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
