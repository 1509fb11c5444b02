#include "comm/agreement_segment.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "base/check.hpp"
#include "base/clock.hpp"

namespace rrfp {

namespace {

constexpr std::int64_t kPauseMs = 2000;  // watch() itself late by this much: we were stopped
constexpr std::int32_t kNumArrays = 3;
constexpr std::uint64_t kWordBytes =
    2 * kNumArrays * std::uint64_t{kMaxAgreementTasks} * sizeof(AgreementSegment::Word);

enum Ending : std::uint32_t { kLive = 0, kClosed = 1, kAborted = 2 };

std::shared_ptr<void> mapping(void* base, std::uint64_t bytes) {
  return {base, [bytes](void* mapped) { munmap(mapped, bytes); }};
}

// UTF-8 must not be cut inside a character.
std::size_t cut(const std::string& text, std::size_t at_most) {
  if (text.size() <= at_most) return text.size();
  while (at_most > 0 && (static_cast<unsigned char>(text[at_most]) & 0xc0) == 0x80) --at_most;
  return at_most;
}

}  // namespace

struct AgreementSegment::Head {
  std::uint64_t nonce;
  std::uint64_t bytes;
  alignas(kCacheLineBytes) SharedEventCount bell;
};

struct alignas(kCacheLineBytes) AgreementSegment::Page {
  std::atomic<std::uint64_t> signature;
  std::atomic<std::uint64_t> life;
  std::atomic<std::uint32_t> is_inside;
  std::atomic<std::uint32_t> ending;  // N1
  std::uint32_t code;
  std::int32_t origin_rank;
  std::uint32_t ending_bytes;
  char ending_text[kMaxEndingBytes];
  std::atomic<std::uint64_t> num_cards;  // N2
  std::uint32_t card_bytes[2];
  std::byte cards[2][kMaxCardBytes];
};

AgreementSegment::AgreementSegment(std::shared_ptr<void> base, std::int32_t num_members, int fd)
    : base_(std::move(base)), num_members_(num_members), fd_(fd) {}

std::unique_ptr<AgreementSegment> AgreementSegment::share() const {
  return std::unique_ptr<AgreementSegment>(new AgreementSegment(base_, num_members_, -1));
}

AgreementSegment::~AgreementSegment() {
  for (const Watched& watched : watched_) {
    if (watched.pidfd >= 0) close(watched.pidfd);
  }
  if (fd_ >= 0) close(fd_);
}

std::uint64_t AgreementSegment::bytes_for(std::int32_t num_members) {
  const std::uint64_t bytes = sizeof(Head) + num_members * sizeof(Page) + kWordBytes;
  return (bytes + 4095) / 4096 * 4096;
}

AgreementSegment::Head& AgreementSegment::head() const { return *static_cast<Head*>(base_.get()); }

AgreementSegment::Page& AgreementSegment::page(std::int32_t member) const {
  auto* const first =
      reinterpret_cast<Page*>(static_cast<std::byte*>(base_.get()) + sizeof(Head) + kWordBytes);
  return first[member];
}

AgreementSegment::Word* AgreementSegment::words(std::uint32_t step, std::int32_t array) const {
  auto* const first = reinterpret_cast<Word*>(static_cast<std::byte*>(base_.get()) + sizeof(Head));
  return first + ((step & 1) * kNumArrays + array) * std::int64_t{kMaxAgreementTasks};
}

SharedEventCount& AgreementSegment::bell() const { return head().bell; }

std::unique_ptr<AgreementSegment> AgreementSegment::create(std::int32_t num_members,
                                                           std::uint64_t nonce) {
  const std::uint64_t bytes = bytes_for(num_members);
  const int fd = memfd_create("rrfp-agreement", MFD_CLOEXEC);
  // Reserved now: a page that could not be had later would end the process with SIGBUS.
  const int error = fd < 0 ? errno : posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  void* const base = error != 0 ? MAP_FAILED
                                : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    const int cause = error != 0 ? error : errno;
    if (fd >= 0) close(fd);
    throw std::system_error(cause, std::generic_category(),
                            "rrfp: shared memory for an agreement group");
  }
  auto* const head = new (base) Head();
  head->nonce = nonce;
  head->bytes = bytes;
  std::unique_ptr<AgreementSegment> segment(
      new AgreementSegment(mapping(base, bytes), num_members, fd));
  for (std::int32_t m = 0; m < num_members; ++m) new (&segment->page(m)) Page();
  return segment;
}

std::unique_ptr<AgreementSegment> AgreementSegment::open(std::int32_t pid, int fd,
                                                         std::int32_t num_members,
                                                         std::uint64_t nonce,
                                                         std::string* refusal) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) {
    *refusal = path + " cannot be opened: " + std::strerror(errno);
    return nullptr;
  }
  struct stat information{};
  const std::uint64_t bytes = bytes_for(num_members);
  const bool fits = fstat(opened, &information) == 0 && S_ISREG(information.st_mode) &&
                    static_cast<std::uint64_t>(information.st_size) == bytes;
  void* const base =
      fits ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0) : MAP_FAILED;
  close(opened);
  *refusal = path + " is not the memory of this group";
  if (base == MAP_FAILED) return nullptr;
  std::unique_ptr<AgreementSegment> segment(
      new AgreementSegment(mapping(base, bytes), num_members, -1));
  return segment->head().nonce == nonce ? std::move(segment) : nullptr;
}

void AgreementSegment::sign(std::int32_t member, std::uint64_t token) {
  page(member).signature.store(token, std::memory_order_relaxed);  // N3
}

bool AgreementSegment::is_signed(std::int32_t member, std::uint64_t token) const {
  return page(member).signature.load(std::memory_order_relaxed) == token;  // N3
}

void AgreementSegment::join(std::int32_t member, std::vector<std::string> names,
                            const std::vector<std::int32_t>& pids) {
  RRFP_CHECK(static_cast<std::int32_t>(names.size()) == num_members_ &&
                 static_cast<std::int32_t>(pids.size()) == num_members_ && member >= 0 &&
                 member < num_members_,
             "an agreement group has another number of members than its memory");
  member_ = member;
  names_ = std::move(names);
  for (std::int32_t m = 0; m < num_members_; ++m) {
    Watched watched;
    if (m != member) {
      // -1 on kernels without it: then only the silence of a dead member is noticed.
      watched.pidfd = static_cast<int>(syscall(SYS_pidfd_open, pids[m], 0));
    }
    watched_.push_back(watched);
  }
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

void AgreementSegment::set_inside(bool is_inside) {
  page(member_).is_inside.store(is_inside, std::memory_order_relaxed);  // N3
}

bool AgreementSegment::is_other_inside() const {
  for (std::int32_t m = 0; m < num_members_; ++m) {
    if (m != member_ && page(m).is_inside.load(std::memory_order_relaxed) != 0) return true;  // N3
  }
  return false;
}

void AgreementSegment::end(const Status& status) {
  {
    std::lock_guard lock(end_mutex_);
    Page& own = page(member_);
    if (own.ending.load(std::memory_order_relaxed) != kLive) return;  // only this process writes
    own.code = static_cast<std::uint32_t>(status.code);
    own.origin_rank = status.origin_rank;
    own.ending_bytes = static_cast<std::uint32_t>(cut(status.message, kMaxEndingBytes));
    std::memcpy(own.ending_text, status.message.data(), own.ending_bytes);
    own.ending.store(status.ok() ? kClosed : kAborted, std::memory_order_release);  // N1
  }
  bell().notify();
}

bool AgreementSegment::has_closed(std::int32_t member) const {
  return page(member).ending.load(std::memory_order_acquire) == kClosed;  // N1
}

Status AgreementSegment::ended(std::int32_t member) const {
  const Page& other = page(member);
  Status status{static_cast<StatusCode>(other.code), other.origin_rank,
                std::string(other.ending_text, other.ending_bytes)};
  const std::string where = "so said " + names_[member] +
                            ", a member of this rank's agreement group in another pipeline";
  // The words of a failed stage have a form of their own, to which something may be added.
  status.message += (status.code == StatusCode::kStageFailed ? "\n" : " (") + where +
                    (status.code == StatusCode::kStageFailed ? "" : ")");
  return status;
}

std::optional<Status> AgreementSegment::trouble() const {
  for (std::int32_t m = 0; m < num_members_; ++m) {
    if (m == member_) continue;
    if (page(m).ending.load(std::memory_order_acquire) == kAborted) return ended(m);  // N1
  }
  return std::nullopt;
}

void AgreementSegment::sign_of_life() {
  page(member_).life.fetch_add(1, std::memory_order_relaxed);  // N3
}

bool AgreementSegment::is_dead(const Watched& watched) const {
  pollfd poll_for{watched.pidfd, POLLIN, 0};
  return watched.pidfd >= 0 && poll(&poll_for, 1, 0) == 1 && (poll_for.revents & POLLIN) != 0;
}

std::optional<Status> AgreementSegment::watch(std::int64_t now_ns, std::int64_t timeout_ms) {
  const bool was_stopped = now_ns - std::exchange(last_watch_ns_, now_ns) > kPauseMs * kNsPerMs;
  for (std::int32_t m = 0; m < num_members_; ++m) {
    if (m == member_) continue;
    Watched& watched = watched_[m];
    const std::uint64_t life = page(m).life.load(std::memory_order_relaxed);  // N3
    if (life != watched.last_life || was_stopped) {
      watched.last_life = life;
      watched.changed_ns = now_ns;
    }
    const bool is_gone = is_dead(watched);
    const std::int64_t silent_ms = (now_ns - watched.changed_ns) / kNsPerMs;
    if (!is_gone && (life == 0 || silent_ms < timeout_ms)) continue;
    // Looked at last: a member ends before it dies.
    const std::uint32_t ending = page(m).ending.load(std::memory_order_acquire);  // N1
    if (ending == kAborted) return ended(m);
    if (ending == kClosed) continue;
    return Status{StatusCode::kPeerLost, -1,
                  names_[m] + ", a member of this rank's agreement group, " +
                      (is_gone ? "has died"
                               : "gave no sign of life for " + std::to_string(silent_ms) +
                                     " ms (it is frozen, or its host does not run it)") +
                      ". The step cannot resume; restart from the last checkpoint."};
  }
  return std::nullopt;
}

void AgreementSegment::post(const std::vector<std::byte>& card) {
  RRFP_CHECK(card.size() <= kMaxCardBytes,
             "a card for the agreement group has " + std::to_string(card.size()) +
                 " bytes; the most is " + std::to_string(kMaxCardBytes));
  Page& own = page(member_);
  const std::uint64_t number = own.num_cards.load(std::memory_order_relaxed);  // its only writer
  own.card_bytes[number & 1] = static_cast<std::uint32_t>(card.size());
  std::memcpy(own.cards[number & 1], card.data(), card.size());
  own.num_cards.store(number + 1, std::memory_order_release);  // N2
  bell().notify();
}

std::uint32_t AgreementSegment::owing() const {
  const std::uint64_t wanted = page(member_).num_cards.load(std::memory_order_relaxed);  // own
  std::uint32_t members = 0;
  for (std::int32_t m = 0; m < num_members_; ++m) {
    if (page(m).num_cards.load(std::memory_order_acquire) < wanted) {  // N2
      members |= std::uint32_t{1} << m;
    }
  }
  return members;
}

std::optional<std::vector<std::vector<std::byte>>> AgreementSegment::collect() const {
  if (owing() != 0) return std::nullopt;
  const std::uint64_t at =
      (page(member_).num_cards.load(std::memory_order_relaxed) - 1) & 1;  // own
  std::vector<std::vector<std::byte>> cards;
  for (std::int32_t m = 0; m < num_members_; ++m) {
    const Page& other = page(m);
    const std::size_t bytes = std::min<std::size_t>(other.card_bytes[at], kMaxCardBytes);
    cards.emplace_back(other.cards[at], other.cards[at] + bytes);
  }
  return cards;
}

}  // namespace rrfp
