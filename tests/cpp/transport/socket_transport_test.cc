// SocketTransport in the conformance suite: ranks are threads, the sockets are real.
#include "comm/socket_transport.hpp"

#include "transport/conformance.hpp"
#include "transport/conformance_endings.hpp"
#include "transport/socket_group.hpp"

namespace rrfp::test {

Setting setting() {
  return {make_socket_transports, {},
          std::uint64_t{32} << 20};
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
