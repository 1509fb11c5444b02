// Addresses as texts, and which one a host tells the others.
#include "comm/socket_address.hpp"

#include "check.hpp"
#include "comm/socket_interface.hpp"

namespace rrfp::test {

TEST_CASE(addresses_as_texts) {
  for (const char* good : {"unix:a", "tcp:127.0.0.1:80", "tcp:[::1]:65535",
                           "unix:a,tcp:1.2.3.4:5"}) {
    CHECK(!parse_addresses(good).empty());
  }
  CHECK(tcp_text(*parse_address("tcp:[::1]:80")) == "tcp:[::1]:80");
  for (const char* bad : {"", "unix:", "tcp:", "tcp::80", "tcp:1.2.3.4", "tcp:1.2.3.4:0",
                          "tcp:1.2.3.4:65536", "tcp:1.2.3.4:80x", "tcp:[::1:80", "tcp:[]:80",
                          "tcp:host.name:80", "udp:1.2.3.4:5", "unix:a,", "unix:a,tcp:b:1"}) {
    CHECK(parse_addresses(bad).empty());
  }
}

TEST_CASE(the_host_that_others_are_told) {
  CHECK(choose_host("127.0.0.1", "") == "127.0.0.1");
  CHECK(choose_host("elsewhere.invalid", "lo") == "127.0.0.1");
  CHECK(choose_host("", "nothing,lo") == "127.0.0.1");
  CHECK_THROWS_WITH(choose_host("127.0.0.1", "nothing0"), "lo 127.0.0.1");
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
