// The address of a rank's device memory: what is written is read, and nothing else is.
#include "comm/ipc_address.hpp"

#include "check.hpp"

namespace rrfp::test {

IpcAddress example() {
  IpcAddress address;
  address.host = "a9f3-boot";
  address.process = 0xffffffffffffffff;
  address.pid = 4194303;
  address.fd = 0;
  address.nonce = 1;
  address.device = 7;
  address.slab_address = 0x7f0000000000;
  for (std::size_t i = 0; i < 64; ++i) address.slab_handle[i] = static_cast<std::byte>(i * 5);
  return address;
}

TEST_CASE(addresses_survive_their_text) {
  const IpcAddress address = example();
  const auto parsed = parse_ipc_address(address.to_text());
  CHECK(parsed.has_value());
  if (!parsed) return;
  CHECK(parsed->host == address.host && parsed->process == address.process);
  CHECK(parsed->pid == address.pid && parsed->fd == address.fd);
  CHECK(parsed->nonce == address.nonce && parsed->device == address.device);
  CHECK(parsed->slab_address == address.slab_address);
  CHECK(parsed->slab_handle == address.slab_handle);
}

// Would catch a parser that takes a prefix, a longer text, or digits that are none.
TEST_CASE(other_texts_are_refused) {
  const std::string text = example().to_text();
  CHECK(!parse_ipc_address(""));
  CHECK(!parse_ipc_address("unix:abc"));
  CHECK(!parse_ipc_address(text + ":"));
  CHECK(!parse_ipc_address(text + "0"));
  CHECK(!parse_ipc_address("ipc2" + text.substr(4)));
  for (std::size_t length = 0; length < text.size(); ++length) {
    CHECK(!parse_ipc_address(text.substr(0, length)));
  }
  for (std::size_t at = text.size() - 128; at < text.size(); ++at) {
    std::string broken = text;
    broken[at] = 'g';
    CHECK(!parse_ipc_address(broken));
  }
  std::string huge_pid = example().to_text();
  huge_pid.replace(huge_pid.find("3fffff"), 6, "1ffffffff");
  CHECK(!parse_ipc_address(huge_pid));
}

TEST_CASE(nonces_differ) {
  CHECK(random_nonce() != random_nonce());
  CHECK(process_nonce() == process_nonce());
  CHECK(!host_boot_id().empty());
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
