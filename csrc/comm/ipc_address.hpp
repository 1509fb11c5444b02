// IpcAddress: what a rank publishes so that others can reach its device memory.
// Text: ipc1:<host>:<process>:<pid>:<fd>:<nonce>:<device>:<slab address>:<slab handle>,
// numbers and bytes in hexadecimal. The host is the kernel's boot id; the process is a random
// number drawn once in it, because pids repeat between containers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace rrfp {

struct IpcAddress {
  std::string host;
  std::uint64_t process = 0;
  std::int32_t pid = -1;
  int fd = -1;
  std::uint64_t nonce = 0;
  int device = -1;
  std::uint64_t slab_address = 0;
  std::array<std::byte, 64> slab_handle{};

  std::string to_text() const;
};

std::optional<IpcAddress> parse_ipc_address(const std::string& text);

// Of this process.
std::string host_boot_id();
std::uint64_t process_nonce();
std::uint64_t random_nonce();

}  // namespace rrfp
