// AgreementSegment: the memory that the members of an agreement group share, and what they tell
// each other through it: the words of their decision logs, a bell, a page each with its ending,
// whether it is inside a task, its last signs of life, and small blobs exchanged between steps.
//
// Memory   One member makes it (memfd: no name, so nothing is left behind on any exit, kill -9
//          included) and says where it is; the others open it through /proc/<pid>/fd. Each signs
//          its page with a token that it has told the others on another way; it is common memory
//          if every member finds every token. Containers that do not share process ids or memory
//          find something else there, and are told so in words.
// Endings  A member that ends a run early leaves its Status in its page and rings; one that
//          closes says so. One that dies says nothing: its process is watched (pidfd). One that
//          is frozen gives no sign of life for the time-out.
// Threads  end(), trouble() and the bell: any. sign_of_life() and watch(): one at a time (the
//          progress thread's tick). The rest: the worker.
// Waits    none of its own: collect() answers at once, the caller sleeps on the bell.
// Bound    kMaxAgreementTasks per step, kMaxCardBytes per card, kMaxEndingBytes of an ending.
// Edges    N1  end() writes code and text, then stores `ending` with release; trouble() acquires.
//          N2  post() writes its card, then stores num_cards with release; collect() acquires
//              every member's before it reads theirs. A card lies in one of two places by turns:
//              a member writes over card n when it has collected n + 1, which all post only
//              after they have read n.
//          N3  signature, is_inside and life are relaxed: each is compared with itself alone.
// Lifetime outlives the logs and the steps that use it. A forked child inherits the mapping and
//          must not use it.
// Checked  tests/cpp/unit/agreement_segment_test.cc, tests/distributed/test_agreement_faults.py.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/cache_line.hpp"
#include "base/event_count.hpp"
#include "base/status.hpp"

namespace rrfp {

inline constexpr std::int32_t kMaxAgreementTasks = 1 << 16;  // of one rank in one step
inline constexpr std::size_t kMaxCardBytes = 16 * 1024;
inline constexpr std::size_t kMaxEndingBytes = 8 * 1024;

class AgreementSegment {
 public:
  using Word = std::atomic<std::uint64_t>;

  // Throws std::system_error when there is no memory.
  static std::unique_ptr<AgreementSegment> create(std::int32_t num_members, std::uint64_t nonce);
  // Null, and `refusal` set, when it is not there or not the one that was meant.
  static std::unique_ptr<AgreementSegment> open(std::int32_t pid, int fd,
                                                std::int32_t num_members, std::uint64_t nonce,
                                                std::string* refusal);
  // The same memory through the same mapping, for a member in this process: ThreadSanitizer
  // takes two mappings of one memory for two memories.
  std::unique_ptr<AgreementSegment> share() const;
  ~AgreementSegment();
  AgreementSegment(const AgreementSegment&) = delete;
  AgreementSegment& operator=(const AgreementSegment&) = delete;

  int fd() const { return fd_; }  // the maker's
  void sign(std::int32_t member, std::uint64_t token);
  bool is_signed(std::int32_t member, std::uint64_t token) const;
  // All have it: from here on the memory lives with its mappings. `names[m]`: member m in words;
  // `pids[m]`: its process.
  void join(std::int32_t member, std::vector<std::string> names,
            const std::vector<std::int32_t>& pids);

  std::int32_t member() const { return member_; }
  std::int32_t num_members() const { return num_members_; }
  const std::string& name(std::int32_t member) const { return names_.at(member); }
  SharedEventCount& bell() const;
  // kMaxAgreementTasks words for each of three arrays: those of steps with this parity.
  Word* words(std::uint32_t step, std::int32_t array) const;

  void set_inside(bool is_inside);
  bool is_other_inside() const;

  // Leaves this member's last word, once; kOk: it closes in peace.
  void end(const Status& status);
  bool has_closed(std::int32_t member) const;
  // What another member has ended with.
  std::optional<Status> trouble() const;
  void sign_of_life();
  // Dead or frozen members; `timeout_ms` without a sign of life counts as frozen.
  std::optional<Status> watch(std::int64_t now_ns, std::int64_t timeout_ms);

  // One card per member and exchange, in the same order everywhere.
  void post(const std::vector<std::byte>& card);
  // By member, once all have posted theirs; until then nullopt.
  std::optional<std::vector<std::vector<std::byte>>> collect() const;
  // Members that have not posted as often as this one, one bit each.
  std::uint32_t owing() const;

 private:
  struct Head;
  struct Page;
  struct Watched {
    int pidfd = -1;
    std::uint64_t last_life = 0;
    std::int64_t changed_ns = 0;
  };

  AgreementSegment(std::shared_ptr<void> base, std::int32_t num_members, int fd);
  static std::uint64_t bytes_for(std::int32_t num_members);
  Head& head() const;
  Page& page(std::int32_t member) const;
  Status ended(std::int32_t member) const;
  bool is_dead(const Watched& watched) const;

  std::shared_ptr<void> base_;
  std::int32_t num_members_;
  int fd_;
  std::int32_t member_ = -1;
  std::vector<std::string> names_;
  std::mutex end_mutex_;            // end() only
  std::vector<Watched> watched_;    // watch() only
  std::int64_t last_watch_ns_ = 0;  // watch() only
};

}  // namespace rrfp
