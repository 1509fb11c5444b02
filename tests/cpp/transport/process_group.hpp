// Ranks that are processes: forked, joined by sockets, driven by the real progress thread.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <new>

#include "comm/progress_thread.hpp"
#include "transport/socket_group.hpp"
#include "transport/test_group.hpp"

namespace rrfp::test {

// Shared by the test and all its ranks.
struct Board {
  static constexpr int kMaxRanks = 4;
  std::atomic<int> num_listening{0};
  std::atomic<int> marks[kMaxRanks] = {};  // a rank tells the test how far it is
  std::atomic<bool> go{false};             // the test tells the ranks to go on
  char addresses[kMaxRanks][128] = {};
};

class Driven final : public Progressing {
 public:
  explicit Driven(Transport& transport) : transport_(transport) {
    ProgressThread::instance().add(this);
  }
  ~Driven() override { ProgressThread::instance().remove(this); }
  std::size_t progress(std::int64_t now_ns) override { return transport_.progress(now_ns); }
  void tick(std::int64_t) override {}
  int wait_fd() const override { return transport_.wait_fd(); }

 private:
  Transport& transport_;
};

// What a rank does once all have published their addresses. Its failed checks are its exit
// status.
using RankBody =
    std::function<void(std::int32_t rank, SocketListener&, const SocketSetup&, Board&)>;

class ProcessGroup {
 public:
  ProcessGroup(std::int32_t num_ranks, const RankBody& body)
      : board_(new (mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board) {
    std::fflush(nullptr);
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        failures() = 0;
        live(rank, num_ranks, body);
        std::fflush(nullptr);
        _exit(std::min(failures(), 100));
      }
      children_.push_back(child);
    }
  }
  ~ProcessGroup() {
    for (const pid_t child : children_) {
      if (child <= 0) continue;
      ::kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    munmap(board_, sizeof(Board));
  }

  Board& board() { return *board_; }
  void signal(std::size_t rank, int number) { ::kill(children_[rank], number); }
  bool reached(std::size_t rank, int mark) {
    return eventually([&] { return board_->marks[rank] >= mark; });
  }
  // True when the rank ended by itself with no failed check.
  bool ends_well(std::size_t rank) {
    int status = 0;
    if (!eventually([&] { return waitpid(children_[rank], &status, WNOHANG) != 0; })) return false;
    children_[rank] = 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  void live(std::int32_t rank, std::int32_t num_ranks, const RankBody& body) {
    SocketListener listener;
    std::strncpy(board_->addresses[rank], listener.address().c_str(), 127);
    ++board_->num_listening;
    CHECK(eventually([&] { return board_->num_listening == num_ranks; }));
    std::vector<std::string> addresses(board_->addresses, board_->addresses + num_ranks);
    body(rank, listener, socket_setup(rank, addresses), *board_);
  }

  Board* board_;
  std::vector<pid_t> children_;
};

// A rank's usual life: joins, is driven, does `act`.
inline void join_and(SocketListener& listener, const SocketSetup& setup,
                     const std::function<void(Member&)>& act) {
  Status status;
  auto transport = connect_sockets(listener, setup, &status);
  if (transport == nullptr) return fail(__FILE__, __LINE__, status.message);
  Member member(std::move(transport), {});
  {
    Driven driven(member.transport());
    act(member);
  }
  member.leave();
}

}  // namespace rrfp::test
