// AgreementSegment: common memory is proven, not trusted; cards; endings; members that die.
#include "comm/agreement_segment.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "base/clock.hpp"
#include "check.hpp"

namespace rrfp {
namespace {

constexpr std::uint64_t kNonce = 0x1234567890abcdefULL;
using Segment = std::unique_ptr<AgreementSegment>;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

// Both members in this process, each through a mapping of its own.
std::pair<Segment, Segment> make_pair() {
  Segment first = AgreementSegment::create(2, kNonce);
  std::string refusal;
  Segment second = AgreementSegment::open(getpid(), first->fd(), 2, kNonce, &refusal);
  const std::vector<std::string> names{"the first", "the second"};
  first->join(0, names, {getpid(), getpid()});
  second->join(1, names, {getpid(), getpid()});
  return {std::move(first), std::move(second)};
}

TEST_CASE(what_is_not_the_groups_memory_is_refused) {
  Segment made = AgreementSegment::create(2, kNonce);
  std::string refusal;
  CHECK(AgreementSegment::open(getpid(), made->fd(), 2, kNonce + 1, &refusal) == nullptr);
  CHECK(refusal.find("not the memory of this group") != std::string::npos);
  CHECK(AgreementSegment::open(getpid(), made->fd(), 3, kNonce, &refusal) == nullptr);
  CHECK(AgreementSegment::open(getpid(), 0, 2, kNonce, &refusal) == nullptr);
  CHECK(AgreementSegment::open(getpid(), 9999, 2, kNonce, &refusal) == nullptr);
  CHECK(refusal.find("cannot be opened") != std::string::npos);
}

TEST_CASE(signatures_tell_common_memory_from_other_memory) {
  Segment made = AgreementSegment::create(2, kNonce);
  std::string refusal;
  Segment same = AgreementSegment::open(getpid(), made->fd(), 2, kNonce, &refusal);
  Segment other = AgreementSegment::create(2, kNonce);
  same->sign(1, 77);
  CHECK(made->is_signed(1, 77));
  CHECK(!made->is_signed(0, 77));
  CHECK(!other->is_signed(1, 77));
}

TEST_CASE(words_of_both_parities_are_apart_and_shared) {
  auto [first, second] = make_pair();
  for (std::uint32_t step = 0; step < 2; ++step) {
    for (std::int32_t array = 0; array < 3; ++array) {
      first->words(step, array)[kMaxAgreementTasks - 1] = 10 * step + array + 1;
    }
  }
  for (std::uint32_t step = 0; step < 2; ++step) {
    for (std::int32_t array = 0; array < 3; ++array) {
      CHECK(second->words(step + 2, array)[kMaxAgreementTasks - 1] == 10 * step + array + 1);
      CHECK(second->words(step, array)[0] == 0);
    }
  }
}

TEST_CASE(cards_are_exchanged_in_rounds) {
  auto [first, second] = make_pair();
  for (int round = 0; round < 5; ++round) {
    first->post(bytes_of("a" + std::to_string(round)));
    CHECK(!first->collect());
    CHECK(first->owing() == 2);
    second->post(bytes_of("b" + std::to_string(round)));
    const auto cards = first->collect();
    CHECK(cards && cards->size() == 2);
    CHECK((*cards)[0] == bytes_of("a" + std::to_string(round)));
    CHECK((*cards)[1] == bytes_of("b" + std::to_string(round)));
    if (round < 4) first->post(bytes_of("ahead"));  // one may be a round ahead of the other
    CHECK(second->collect() == cards);
    if (round < 4) {
      second->post(bytes_of("there"));
      CHECK(first->collect() == second->collect());
    }
  }
  CHECK_THROWS_WITH(first->post(std::vector<std::byte>(kMaxCardBytes + 1)), "the most is");
}

TEST_CASE(an_ending_reaches_the_others_with_its_words) {
  auto [first, second] = make_pair();
  CHECK(!second->trouble());
  first->end({StatusCode::kStageFailed, 3, "2F1\nValueError: no\ntrace"});
  first->end({});  // the first word counts
  const auto trouble = second->trouble();
  CHECK(trouble && trouble->code == StatusCode::kStageFailed && trouble->origin_rank == 3);
  CHECK(trouble->message.find("2F1\nValueError: no\ntrace\nso said the first") == 0);
  CHECK(!first->trouble());
  second->end({});
  CHECK(first->has_closed(1));
  CHECK(!first->trouble());
}

TEST_CASE(a_long_ending_is_cut_between_characters) {
  auto [first, second] = make_pair();
  std::string text = "x";
  while (text.size() < 2 * kMaxEndingBytes) text += "\xc3\xa4";
  first->end({StatusCode::kStalled, 0, text});
  const std::string said = second->trouble()->message;
  const std::size_t end = said.find(" (so said");
  CHECK(end == kMaxEndingBytes - 1);
}

TEST_CASE(a_frozen_member_is_noticed_and_a_pause_of_our_own_is_forgiven) {
  auto [first, second] = make_pair();
  second->sign_of_life();
  const std::int64_t ms = 1000000;
  CHECK(!first->watch(10000 * ms, 500));
  CHECK(!first->watch(10400 * ms, 500));
  CHECK(!first->watch(20000 * ms, 500));  // this process was away itself
  CHECK(!first->watch(20400 * ms, 500));
  const auto trouble = first->watch(20600 * ms, 500);
  CHECK(trouble && trouble->code == StatusCode::kPeerLost);
  CHECK(trouble->message.find("the second") == 0);
  second->end({});
  CHECK(!first->watch(20700 * ms, 500));  // who has closed may be silent
}

// kill -9 of the member that made the memory: noticed, and nothing of it is left.
TEST_CASE(a_killed_member_is_noticed) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    Segment made = AgreementSegment::create(2, kNonce);
    const int fd = made->fd();
    if (write(ends[1], &fd, sizeof fd) < 0) _exit(1);
    pause();
    _exit(0);
  }
  int fd = -1;
  CHECK(read(ends[0], &fd, sizeof fd) == sizeof fd);
  std::string refusal;
  Segment mine = AgreementSegment::open(child, fd, 2, kNonce, &refusal);
  CHECK(mine != nullptr);
  mine->join(1, {"the child", "this one"}, {child, getpid()});
  CHECK(!mine->watch(steady_now_ns(), 60000));
  kill(child, SIGKILL);
  std::optional<Status> trouble;
  for (int look = 0; look < 2000 && !trouble; ++look) {
    trouble = mine->watch(steady_now_ns(), 60000);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(trouble && trouble->code == StatusCode::kPeerLost);
  CHECK(trouble && trouble->message.find("the child") == 0 &&
        trouble->message.find("has died") != std::string::npos);
  waitpid(child, nullptr, 0);
  mine->words(0, 0)[5] = 1;  // the memory lives with its mapping
  CHECK(mine->words(0, 0)[5] == 1);
}

}  // namespace
}  // namespace rrfp

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
