#include "comm/ipc_segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace rrfp {

namespace {
void* map_shared(int fd, std::uint64_t bytes, std::uint64_t offset) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                    static_cast<off_t>(offset));
  return base == MAP_FAILED ? nullptr : base;
}
}  // namespace

IpcSegment::IpcSegment(IpcSegment&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      fd_(std::exchange(other.fd_, -1)) {}

IpcSegment& IpcSegment::operator=(IpcSegment&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

IpcSegment::~IpcSegment() {
  if (base_ != nullptr) munmap(base_, bytes_);
  if (fd_ >= 0) close(fd_);
}

IpcPage* IpcSegment::page(std::int32_t index) const {
  return reinterpret_cast<IpcPage*>(static_cast<std::byte*>(base_) +
                                    static_cast<std::uint64_t>(index) * kIpcPageBytes);
}

IpcSegment IpcSegment::create(std::int32_t num_pages, std::uint64_t nonce) {
  IpcSegment segment;
  segment.bytes_ = static_cast<std::uint64_t>(num_pages) * kIpcPageBytes;
  segment.fd_ = memfd_create("rrfp", MFD_CLOEXEC);
  if (segment.fd_ >= 0 && ftruncate(segment.fd_, static_cast<off_t>(segment.bytes_)) == 0) {
    segment.base_ = map_shared(segment.fd_, segment.bytes_, 0);
  }
  if (segment.base_ == nullptr) {
    throw std::system_error(errno, std::generic_category(), "rrfp: shared memory for messages");
  }
  for (std::int32_t i = 0; i < num_pages; ++i) segment.page(i)->nonce = nonce;
  return segment;
}

IpcSegment IpcSegment::open(std::int32_t pid, int fd, std::int32_t page_index,
                            std::uint64_t nonce, std::string* refusal) {
  IpcSegment segment;
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const std::uint64_t offset = static_cast<std::uint64_t>(page_index) * kIpcPageBytes;
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) {
    *refusal = path + " cannot be opened: " + std::strerror(errno);
    return segment;
  }
  struct stat information{};
  const bool has_page =
      fstat(opened, &information) == 0 && S_ISREG(information.st_mode) &&
      static_cast<std::uint64_t>(information.st_size) >= offset + kIpcPageBytes;
  void* base = has_page ? map_shared(opened, kIpcPageBytes, offset) : nullptr;
  close(opened);
  if (base == nullptr) {
    *refusal = path + " is not memory of this run";
    return segment;
  }
  segment.base_ = base;
  segment.bytes_ = kIpcPageBytes;
  if (segment.page(0)->nonce == nonce) return segment;
  *refusal = path + " is not memory of this run";
  return IpcSegment();
}

}  // namespace rrfp
