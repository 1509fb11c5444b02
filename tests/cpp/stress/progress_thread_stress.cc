// The progress thread with both transports under load, while transports come, go and abort.
// Run under TSan.
#include "comm/progress_thread.hpp"

#include <thread>

#include "check.hpp"
#include "comm/local_transport.hpp"
#include "transport/process_group.hpp"

namespace rrfp::test {

constexpr std::size_t kRanks = 3;

using MakeTransports = std::vector<std::unique_ptr<Transport>> (*)(std::int32_t);

// A pipeline group, driven by the process's thread where it needs it.
struct DrivenGroup {
  explicit DrivenGroup(MakeTransports make) {
    for (auto& transport : make(kRanks)) {
      members.push_back(std::make_unique<Member>(std::move(transport), PayloadPlace{}));
    }
    for (auto& member : members) driven.push_back(std::make_unique<Driven>(member->transport()));
  }
  std::vector<std::unique_ptr<Member>> members;
  std::vector<std::unique_ptr<Driven>> driven;
};

void post_random(Member& from, std::size_t rank, std::uint64_t stream, int count) {
  Random random(seed() + stream);
  for (int i = 0; i < count; ++i) {
    const auto to = static_cast<std::int32_t>((rank + 1 + random.below(2)) % kRanks);
    if (random.below(10) == 0) {
      from.send_control(to, MessageType::kHeartbeat, {std::byte{1}});
    } else {
      from.send(to, stream * 1000 + static_cast<std::uint64_t>(i), {random.below(4000)});
    }
  }
}

// Two producers for each rank; an abort from yet another thread, at a random moment.
void run_with_abort(MakeTransports make, std::uint64_t round) {
  DrivenGroup group(make);
  Random random(seed() * 31 + round);
  const std::size_t victim = random.below(kRanks);
  const std::size_t after = random.below(200);
  const Status why{StatusCode::kStageFailed, static_cast<std::int32_t>(victim), "a test"};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 2 * kRanks; ++i) {
    threads.emplace_back([&, i] {
      post_random(*group.members[i % kRanks], i % kRanks, round * 10 + i, 150);
    });
  }
  threads.emplace_back([&] {
    eventually([&] { return group.members[victim]->sink().num_received() >= after; }, 5);
    group.members[victim]->transport().abort(why);
  });
  for (auto& thread : threads) thread.join();
  for (auto& member : group.members) member->transport().abort(why);
  for (auto& member : group.members) {
    CHECK(member->all_sends_end());
    CHECK(member->sink().record().defects.empty());
  }
  group.driven.clear();
  for (auto& member : group.members) member->leave();
  for (auto& member : group.members) CHECK(member->sink().pool().usage().live_bytes == 0);
}

TEST_CASE(local_transports_that_abort) {
  for (std::uint64_t round = 0; round < 25; ++round) run_with_abort(make_local_transports, round);
}

TEST_CASE(socket_transports_that_abort) {
  for (std::uint64_t round = 0; round < 25; ++round) run_with_abort(make_socket_transports, round);
}

// Several pipelines at once, each made, used and closed by a thread of its own: members come and
// go while the thread is at work, and it starts and ends many times.
TEST_CASE(pipelines_come_and_go) {
  std::vector<std::thread> owners;
  for (std::uint64_t owner = 0; owner < 3; ++owner) {
    owners.emplace_back([owner] {
      for (std::uint64_t round = 0; round < 6; ++round) {
        const bool local = (owner + round) % 2 == 0;
        DrivenGroup group(local ? make_local_transports : make_socket_transports);
        post_random(*group.members[0], 0, owner, 40);
        CHECK(group.members[0]->all_sends_end());
        CHECK(group.members[0]->sink().record().bad_sends.empty());
        if (round % 3 == 2) {
          group.driven.clear();
          std::this_thread::yield();
        }
      }
    });
  }
  for (auto& owner : owners) owner.join();
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
