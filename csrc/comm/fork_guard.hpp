// Fork guard: a child that the process forks must not keep rrfp's descriptors, or a dead rank's
// connections would stay open and nobody would notice its death.
//
// Every descriptor of rrfp is a Descriptor. A fork waits until none is being opened or closed;
// in the child all of them are closed before fork() returns there, and process_was_forked()
// is true for good if there were any. A child forked while rrfp holds nothing open starts
// afresh.
// Threads  any. A mutex is taken to open and close, never to use a descriptor.
#pragma once

#include <functional>

namespace rrfp {

// True in a child forked while rrfp was in use: no call into rrfp can work there.
bool process_was_forked();

// Owns one descriptor of this process, and none in a forked child.
class Descriptor {
 public:
  Descriptor() = default;
  // Calls `open_it` while no fork can come between; -1 with errno set gives an empty one.
  static Descriptor open(const std::function<int()>& open_it);
  ~Descriptor() { close(); }
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept;

  int get() const { return fd_; }  // -1: empty
  explicit operator bool() const { return fd_ >= 0; }
  // In a forked child the number may be somebody else's by now: then nothing is closed.
  void close();

 private:
  int fd_ = -1;
};

}  // namespace rrfp
