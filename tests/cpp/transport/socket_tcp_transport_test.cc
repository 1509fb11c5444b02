// SocketTransport over TCP in the conformance suite: loopback, IPv4.
#include "comm/socket_transport.hpp"

#include "transport/conformance.hpp"
#include "transport/conformance_endings.hpp"
#include "transport/socket_group.hpp"

namespace rrfp::test {

Setting setting() {
  return {[](std::int32_t num_ranks) { return make_transports_at("127.0.0.1", num_ranks); },
          {}, std::uint64_t{32} << 20};
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
