// LocalTransport in the conformance suite, and what only it does.
#include "comm/local_transport.hpp"

#include "transport/conformance.hpp"
#include "transport/conformance_endings.hpp"

namespace rrfp::test {

Setting setting() { return {make_local_transports, {}, std::uint64_t{32} << 20}; }

// Catches an attachment that is lost, copied, or left with the sender too.
TEST_CASE(attachments_move) {
  Group group = make_group(2);
  CHECK(group[0].transport().shares_address_space());
  group[1].sink().hold(0);
  int tensor = 0;
  TestMessage message({}, 5, {});
  message.attachment = &tensor;
  group[0].transport().post_send(1, &message);
  CHECK(message.attachment == &tensor);
  const auto held = group[1].sink().record().held;
  CHECK(held.size() == 1);
  InboundMessage buffer;
  buffer.header = held[0].header;
  buffer.metadata = held[0].metadata;
  static void* arrived = nullptr;
  buffer.release = [](InboundMessage* released) { arrived = released->attachment; };
  group[1].transport().post_recv(held[0].ticket, &buffer);
  CHECK(arrived == &tensor);
  CHECK(message.attachment == nullptr);
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
