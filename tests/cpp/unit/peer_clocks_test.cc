// PeerClocks: the offset of two clocks from heartbeats, and moments of a header carried over.
// Would catch: an offset with the wrong sign, a late heartbeat that counts as much as a prompt
// one, a drifting clock that is measured once and for all, a wrap of the 32 bits.
#include "runtime/peer_clocks.hpp"

#include <array>
#include <random>

#include "base/clock.hpp"
#include "check.hpp"

using namespace rrfp;
using namespace rrfp::test;

namespace {

constexpr std::int64_t kSecondNs = 1000000000;
constexpr std::int64_t kHourNs = 3600 * kSecondNs;

// Two ranks whose clocks differ, and the line between them; time is that of rank 0.
struct Pair {
  explicit Pair(std::int64_t offset_ns) : offset_ns(offset_ns) {}

  // Rank `from` sends a heartbeat now; it comes delay_ns later, which is now from then on.
  void beat(std::int32_t from, std::int64_t delay_ns) {
    const ClockEcho sent = clocks[from].echo_to(1 - from, clock(from));
    now_ns += delay_ns;
    std::array<std::byte, sizeof sent> wire{};
    write_echo(sent, wire);
    clocks[1 - from].heard(from, *parse_echo(wire), clock(1 - from));
  }
  void exchange(std::int64_t there_ns, std::int64_t back_ns) {
    beat(0, there_ns);
    now_ns += kSecondNs / 2;  // what passes at the peer does not count
    beat(1, back_ns);
  }
  std::int64_t clock(std::int32_t rank) const { return rank == 0 ? now_ns : now_ns + offset_ns; }
  // How far rank 0 is from the truth about something that rank 1 did ago_ns before.
  std::int64_t error_ns(std::int64_t ago_ns) const {
    const std::int64_t at_ns = now_ns - ago_ns;
    return clocks[0].to_own_ns(1, to_short_us(at_ns + offset_ns), now_ns) - at_ns;
  }

  std::int64_t offset_ns;
  std::int64_t now_ns = 100 * kHourNs;
  std::array<PeerClocks, 2> clocks{PeerClocks(2, false), PeerClocks(2, false)};
};

bool is_within(std::int64_t value, std::int64_t least, std::int64_t most) {
  return value >= least && value <= most;
}

}  // namespace

TEST_CASE(moments_keep_their_microsecond_in_32_bits) {
  std::mt19937_64 random(seed());
  for (int i = 0; i < 100000; ++i) {
    const auto now_ns = static_cast<std::int64_t>(random() % (std::uint64_t{1} << 60)) + kHourNs;
    const auto ago_ns = static_cast<std::int64_t>(random() % (35 * 60 * kSecondNs));
    const std::int64_t back_ns = from_short_us(to_short_us(now_ns - ago_ns), now_ns);
    CHECK(is_within(back_ns - (now_ns - ago_ns), 0, 1999));  // 0 means not known and reads as 1
  }
  CHECK(to_short_us(std::int64_t{1000} << 32) == 1);
}

TEST_CASE(nothing_is_known_before_an_answer) {
  Pair pair(5 * kHourNs);
  CHECK(pair.clocks[0].to_own_ns(1, 77, pair.now_ns) == 0);
  pair.beat(1, 1000);
  CHECK(pair.clocks[0].to_own_ns(1, 77, pair.now_ns) == 0);  // it came, but answered nothing
  pair.beat(0, 1000);
  CHECK(pair.clocks[1].to_own_ns(0, 77, pair.clock(1)) != 0);
  CHECK(pair.clocks[1].to_own_ns(0, 0, pair.clock(1)) == 0);  // the sender did not know
  CHECK(pair.clocks[1].to_own_ns(9, 77, pair.clock(1)) == 0);
}

TEST_CASE(the_offset_is_right_within_half_the_round_trip) {
  std::mt19937_64 random(seed());
  for (int i = 0; i < 2000; ++i) {
    const auto offset_ns = static_cast<std::int64_t>(random() % (150 * kHourNs)) - 75 * kHourNs;
    const auto there_ns = static_cast<std::int64_t>(random() % 20000000);
    const auto back_ns = static_cast<std::int64_t>(random() % 20000000);
    Pair pair(offset_ns);
    pair.exchange(there_ns, back_ns);
    const std::int64_t bound_ns = std::abs(there_ns - back_ns) / 2 + 2000;
    const auto ago_ns = static_cast<std::int64_t>(random() % kSecondNs) + bound_ns;
    CHECK(is_within(pair.error_ns(ago_ns), -bound_ns, bound_ns));
  }
}

// A heartbeat that was read late leaves a sample that a better one replaces, not the other way.
TEST_CASE(the_smallest_round_trip_counts) {
  Pair pair(-3 * kHourNs);
  pair.exchange(300000000, 5000000);
  CHECK(pair.error_ns(kSecondNs) < -100000000 || pair.error_ns(kSecondNs) > 100000000);
  pair.exchange(5000000, 5000000);
  CHECK(is_within(pair.error_ns(kSecondNs), 0, 2000));
  for (int i = 0; i < 5; ++i) pair.exchange(5000000, 90000000);
  CHECK(is_within(pair.error_ns(kSecondNs), 0, 2000));
}

// 100 ppm apart, measured for an hour: the error stays that of minutes, not of the hour.
TEST_CASE(clocks_that_drift_are_measured_again) {
  Pair pair(kHourNs);
  pair.exchange(100000, 100000);
  for (int i = 0; i < 3600; ++i) {
    pair.now_ns += kSecondNs / 2;
    pair.offset_ns += 100000;
    pair.exchange(150000, 150000);
  }
  CHECK(is_within(pair.error_ns(kSecondNs), -300000, 300000));
}

TEST_CASE(what_is_computed_is_never_later_than_now) {
  Pair pair(0);
  pair.exchange(0, 0);
  CHECK(pair.error_ns(-kSecondNs) == -kSecondNs);  // a second from now reads as now
}

TEST_CASE(the_first_heartbeats_are_answered_at_once_and_no_more) {
  Pair pair(kHourNs);
  CHECK(!pair.clocks[0].owes(1));
  for (int i = 0; i < PeerClocks::kPromptEchoes; ++i) {
    pair.beat(1, 1000);
    CHECK(pair.clocks[0].owes(1));
    pair.beat(0, 1000);
    CHECK(!pair.clocks[0].owes(1));
  }
  pair.beat(1, 1000);
  CHECK(!pair.clocks[0].owes(1));
}

TEST_CASE(ranks_of_one_process_have_one_clock) {
  PeerClocks clocks(3, true);
  clocks.heard(1, {5, 3, 4}, 9 * kSecondNs);  // nonsense that must not count
  CHECK(!clocks.owes(1));
  CHECK(clocks.to_own_ns(1, to_short_us(8 * kSecondNs), 9 * kSecondNs) == 8 * kSecondNs);
}

TEST_CASE(times_that_cannot_be_are_refused) {
  std::array<std::byte, sizeof(ClockEcho)> wire{};
  const auto is_taken = [&](const ClockEcho& echo) {
    write_echo(echo, wire);
    return parse_echo(wire).has_value();
  };
  CHECK(is_taken({5, 0, 0}) && is_taken({5, 9, 5}));
  CHECK(!is_taken({-1, 0, 0}) && !is_taken({5, -1, 0}) && !is_taken({5, 0, -1}));
  CHECK(!is_taken({5, 9, 6}));  // heard after it was sent
  CHECK(!is_taken({INT64_MAX, 0, 0}) && !is_taken({5, INT64_MAX, 0}));
  CHECK(!parse_echo(std::span(wire).first(sizeof(ClockEcho) - 1)));
  Pair pair(0);
  pair.clocks[0].heard(1, {INT64_MAX / 4, INT64_MAX / 4, 0}, pair.now_ns);  // and no such exchange
  CHECK(pair.clocks[0].to_own_ns(1, 77, pair.now_ns) == 0);
}

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
