// IpcSegment: host memory that the ranks of one host share, one page for each sender to a
// receiver: the words that say "copied", written by the sender's device.
//
// The receiver makes the segment (memfd: no name, nothing is left behind on any exit) and
// publishes where it is; a sender opens it through /proc/<pid>/fd and believes that it is the
// right one only when it holds the nonce of the address. Containers that do not share their
// process ids see nothing or another file there, and are told so in words.
// Threads  None of its own: the words are read and written as stream_word.hpp says.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

namespace rrfp {

inline constexpr std::uint32_t kIpcWords = 512;      // messages granted at once, for each edge
inline constexpr std::uint64_t kIpcPageBytes = 4096;

// Layout of a page. Written by the owner: nonce. By the sender's process: num_mapped, with
// release after its copies have ended (I1); the owner loads it with acquire before it frees
// memory. By the sender's device: words.
struct IpcPage {
  std::uint64_t nonce;
  std::atomic<std::uint32_t> num_mapped;  // slabs of the owner that the sender has open
  std::uint32_t reserved[13];
  std::uint32_t words[kIpcWords];
};
static_assert(sizeof(IpcPage) <= kIpcPageBytes);

class IpcSegment {
 public:
  IpcSegment() = default;
  ~IpcSegment();
  IpcSegment(IpcSegment&& other) noexcept;
  IpcSegment& operator=(IpcSegment&& other) noexcept;

  // The receiver's side; throws std::system_error. `num_pages`: one for each rank.
  static IpcSegment create(std::int32_t num_pages, std::uint64_t nonce);

  // The sender's side: maps the page of `page_index`. Not valid, and `refusal` set, when it is
  // not there or not the one that was meant.
  static IpcSegment open(std::int32_t pid, int fd, std::int32_t page_index, std::uint64_t nonce,
                         std::string* refusal);

  bool is_valid() const { return base_ != nullptr; }
  int fd() const { return fd_; }
  IpcPage* page(std::int32_t index) const;

 private:
  void* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  int fd_ = -1;  // the creator's; a forked child keeps a copy, which does no harm to anyone
};

}  // namespace rrfp
