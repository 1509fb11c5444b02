#include "comm/ipc_address.hpp"

#include <sys/random.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <string_view>
#include <vector>

namespace rrfp {

namespace {

constexpr std::string_view kTag = "ipc1";
constexpr std::string_view kDigits = "0123456789abcdef";
constexpr std::size_t kNumFields = 9;

std::string hex(std::uint64_t value) {
  char text[16];
  const auto end = std::to_chars(text, text + sizeof text, value, 16).ptr;
  return std::string(text, end);
}

template <class T>
bool parse_hex(std::string_view text, T* value) {
  std::uint64_t parsed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed, 16);
  *value = static_cast<T>(parsed);
  return error == std::errc{} && end == text.data() + text.size() &&
         static_cast<std::uint64_t>(*value) == parsed;
}

bool parse_bytes(std::string_view text, std::array<std::byte, 64>* bytes) {
  if (text.size() != 2 * bytes->size()) return false;
  for (std::size_t i = 0; i < bytes->size(); ++i) {
    const std::size_t high = kDigits.find(text[2 * i]);
    const std::size_t low = kDigits.find(text[2 * i + 1]);
    if (high == std::string_view::npos || low == std::string_view::npos) return false;
    (*bytes)[i] = static_cast<std::byte>(high * 16 + low);
  }
  return true;
}

}  // namespace

std::string IpcAddress::to_text() const {
  std::string text(kTag);
  text += ":" + host + ":" + hex(process) + ":" + hex(static_cast<std::uint64_t>(pid)) + ":" +
          hex(static_cast<std::uint64_t>(fd)) + ":" + hex(nonce) + ":" +
          hex(static_cast<std::uint64_t>(device)) + ":" + hex(slab_address) + ":";
  for (const std::byte byte : slab_handle) {
    text += kDigits[std::to_integer<std::size_t>(byte) / 16];
    text += kDigits[std::to_integer<std::size_t>(byte) % 16];
  }
  return text;
}

std::optional<IpcAddress> parse_ipc_address(const std::string& text) {
  std::vector<std::string_view> fields;
  std::string_view rest = text;
  while (fields.size() + 1 < kNumFields) {
    const std::size_t end = rest.find(':');
    if (end == std::string_view::npos) return std::nullopt;
    fields.push_back(rest.substr(0, end));
    rest.remove_prefix(end + 1);
  }
  fields.push_back(rest);
  IpcAddress address;
  if (fields[0] != kTag) return std::nullopt;
  address.host = fields[1];
  const bool is_whole =
      parse_hex(fields[2], &address.process) && parse_hex(fields[3], &address.pid) &&
      parse_hex(fields[4], &address.fd) && parse_hex(fields[5], &address.nonce) &&
      parse_hex(fields[6], &address.device) && parse_hex(fields[7], &address.slab_address) &&
      parse_bytes(fields[8], &address.slab_handle);
  if (!is_whole) return std::nullopt;
  return address;
}

std::string host_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text;
}

std::uint64_t random_nonce() {
  std::uint64_t nonce = 0;
  while (getrandom(&nonce, sizeof nonce, 0) != static_cast<ssize_t>(sizeof nonce)) {
  }
  return nonce;
}

std::uint64_t process_nonce() {
  // A forked child has its parent's number, and another pid: both are compared.
  static const std::uint64_t nonce = random_nonce();
  return nonce;
}

}  // namespace rrfp
