// Ranks as forked processes that meet in shared memory. The parent never touches CUDA: a
// process forked after that could not use it.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "device/cuda_support.hpp"

namespace rrfp::test {

inline constexpr int kMaxRanks = 4;
inline constexpr int kMaxMeetings = 16;
inline constexpr int kRankTimeoutS = 120;

// What the ranks of one case share.
struct Meetings {
  struct Round {
    std::atomic<int> num_there;
    char texts[kMaxRanks][4096];
  };
  Round rounds[kMaxMeetings];
  std::atomic<std::uint32_t> flags[kMaxRanks];  // for the case's own use
};

struct RankContext {
  int rank = 0;
  int num_ranks = 0;
  Meetings* meetings = nullptr;
  int round = 0;

  // Gives a text, takes everybody's; also a barrier.
  std::vector<std::string> meet(const std::string& text) {
    Meetings::Round& at = meetings->rounds[round++];
    std::snprintf(at.texts[rank], sizeof at.texts[rank], "%s", text.c_str());
    at.num_there.fetch_add(1);
    for (int waited_ms = 0; at.num_there.load() < num_ranks; ++waited_ms) {
      if (waited_ms > kRankTimeoutS * 1000) throw std::runtime_error("a rank did not come");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return {at.texts, at.texts + num_ranks};
  }
};

// Runs body in `num_ranks` processes. Fails for each that does not end with all checks held,
// except rank `victim`, which must end by SIGKILL.
inline void run_ranks(int num_ranks, void (*body)(RankContext&), int victim = -1) {
  void* memory = mmap(nullptr, sizeof(Meetings), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* meetings = static_cast<Meetings*>(memory);
  std::fflush(nullptr);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t pid = fork();
    if (pid != 0) {
      pids.push_back(pid);
      continue;
    }
    failures() = 0;  // of earlier cases
    alarm(kRankTimeoutS);
    RankContext context{rank, num_ranks, meetings, 0};
    try {
      body(context);
    } catch (const std::exception& error) {
      fail("a rank", rank, std::string("threw: ") + error.what());
    }
    std::fflush(nullptr);
    _exit(failures() == 0 ? 0 : 1);
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    int status = 0;
    waitpid(pids[static_cast<std::size_t>(rank)], &status, 0);
    const bool is_right = rank == victim ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                         : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!is_right) {
      fail("rank", rank,
           WIFSIGNALED(status) ? "ended by signal " + std::to_string(WTERMSIG(status))
                               : "ended with " + std::to_string(WEXITSTATUS(status)));
    }
  }
  munmap(memory, sizeof(Meetings));
}

// run(), or 77 and a line that says why, where no device can be used.
inline int run_on_devices(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::fflush(nullptr);
  const pid_t pid = fork();  // asking starts CUDA, after which no rank could be forked
  if (pid == 0) {
    const CudaSupport support = cuda_support();
    if (!support.refusal.empty()) std::printf("skipped: %s\n", support.refusal.c_str());
    std::fflush(nullptr);
    _exit(support.refusal.empty() ? 0 : 77);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return 77;
  return run(argc, argv);
}

}  // namespace rrfp::test
