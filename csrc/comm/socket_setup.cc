#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "base/check.hpp"
#include "base/clock.hpp"
#include "comm/socket_address.hpp"
#include "comm/socket_greeting.hpp"
#include "comm/socket_mesh.hpp"
#include "comm/socket_transport.hpp"

namespace rrfp {

namespace {

constexpr std::int64_t kMsInNs = 1000000;
constexpr std::int64_t kFirstRetryMs = 5;
constexpr std::int64_t kLongestRetryMs = 200;
constexpr std::int64_t kAskMs = 50;          // how often interrupted() is asked
constexpr int kAcceptsPerTurn = 64;
// A packet of the handshake may be lost more than once; then another address has its turn.
constexpr std::int64_t kConnectMs = 8000;

// Our call to a lower rank.
struct Call {
  std::vector<SocketAddress> where;
  std::size_t next_where = 0;
  Descriptor socket;
  bool is_connecting = false;  // else: connected, the hello is out, the answer is awaited
  std::int64_t since_ns = 0;   // of the attempt
  GreetingReader answer;
  std::int64_t next_attempt_ns = 0;
  std::int64_t retry_ms = kFirstRetryMs;
  std::int64_t num_attempts = 0;
  std::string seen;   // how the last attempt ended
};

// Somebody who connected to us and has not shown who they are.
struct Arrival {
  Descriptor socket;
  std::int64_t since_ns = 0;
  GreetingReader greeting;
};

std::string in_seconds(std::int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) / 1e9);
  return text;
}

class MeshSetup {
 public:
  MeshSetup(SocketListener& listener, const SocketSetup& setup)
      : listener_(listener), setup_(setup), start_ns_(steady_now_ns()),
        connections_(setup.addresses.size()), calls_(static_cast<std::size_t>(setup.rank)) {
    for (std::size_t peer = 0; peer < calls_.size(); ++peer) {
      calls_[peer].where = parse_addresses(setup.addresses[peer]);
    }
  }

  std::unique_ptr<Transport> run(Status* status);

 private:
  bool is_complete() const;
  bool is_over(std::int64_t now_ns);
  void advance_call(std::size_t peer, std::int64_t now_ns);
  void connect(std::size_t peer, std::int64_t now_ns);
  void retry_later(std::size_t peer, std::int64_t now_ns, const std::string& seen);
  void finish_connect(std::size_t peer, std::int64_t now_ns);
  void greet(std::size_t peer, std::int64_t now_ns);
  void read_answer(std::size_t peer, std::int64_t now_ns);
  void accept_arrivals(std::int64_t now_ns);
  bool accept_one(const Descriptor& socket, std::int64_t now_ns);
  bool has_room(std::int64_t now_ns) const;
  void read_arrivals();
  bool is_settled(Arrival& arrival);
  std::string refusal_of(const MessageHeader& hello) const;
  void turn_away(const std::string& why);
  void wait(std::int64_t now_ns);
  void fail(StatusCode code, std::int32_t origin_rank, const std::string& message);
  std::string missing_peers(std::int64_t now_ns) const;
  std::string me() const { return "rank " + std::to_string(setup_.rank); }
  std::string peer_name(std::size_t peer) const {
    return "rank " + std::to_string(peer) + " at " + setup_.addresses[peer];
  }

  SocketListener& listener_;
  const SocketSetup& setup_;
  const std::int64_t start_ns_;
  std::int64_t next_ask_ns_ = 0;
  std::vector<Descriptor> connections_;  // by rank, those past the greeting
  std::vector<Call> calls_;              // to the ranks below ours
  std::vector<Arrival> arrivals_;        // oldest first; at most kMaxStrangers
  std::int64_t num_turned_away_ = 0;
  std::string turned_away_because_;
  Status status_;
};

std::unique_ptr<Transport> MeshSetup::run(Status* status) {
  while (!is_complete()) {
    const std::int64_t now_ns = steady_now_ns();
    if (is_over(now_ns)) break;
    for (std::size_t peer = 0; peer < calls_.size(); ++peer) advance_call(peer, now_ns);
    accept_arrivals(now_ns);
    read_arrivals();
    if (status_.ok() && !is_complete()) wait(now_ns);
  }
  listener_.close();
  *status = status_;
  if (!status_.ok()) return nullptr;
  return make_socket_mesh(setup_.rank, setup_.run, std::move(connections_));
}

bool MeshSetup::is_complete() const {
  for (std::size_t peer = 0; peer < connections_.size(); ++peer) {
    if (!connections_[peer] && peer != static_cast<std::size_t>(setup_.rank)) return false;
  }
  return status_.ok();
}

bool MeshSetup::is_over(std::int64_t now_ns) {
  if (!status_.ok()) return true;
  if (now_ns >= next_ask_ns_) {
    next_ask_ns_ = now_ns + kAskMs * kMsInNs;
    if (setup_.interrupted && setup_.interrupted()) {
      fail(StatusCode::kInterrupted, setup_.rank,
           me() + " was interrupted while it waited for its peers: " + missing_peers(now_ns));
      return true;
    }
  }
  if (now_ns - start_ns_ < setup_.timeout_ms * kMsInNs) return false;
  fail(StatusCode::kTimedOut, setup_.rank,
       me() + " waited " + in_seconds(now_ns - start_ns_) + " for its peers. Not there: " +
           missing_peers(now_ns) + ". Look at the output of these ranks first.");
  return true;
}

void MeshSetup::advance_call(std::size_t peer, std::int64_t now_ns) {
  if (connections_[peer]) return;
  if (calls_[peer].is_connecting) {
    finish_connect(peer, now_ns);
  } else if (calls_[peer].socket) {
    read_answer(peer, now_ns);
  } else if (now_ns >= calls_[peer].next_attempt_ns) {
    connect(peer, now_ns);
  }
}

void MeshSetup::connect(std::size_t peer, std::int64_t now_ns) {
  Call& call = calls_[peer];
  ++call.num_attempts;
  call.since_ns = now_ns;
  const SocketAddress& where = call.where[call.next_where];
  call.socket = Descriptor::open([&where] {
    return ::socket(where.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  });
  if (!call.socket) throw std::system_error(errno, std::generic_category(), "rrfp: socket");
  if (::connect(call.socket.get(), where.get(), where.length) == 0) return greet(peer, now_ns);
  if (errno == EINPROGRESS) {
    call.is_connecting = true;
    return;
  }
  // EAGAIN: its queue of connections is full, because it has not come to accept them.
  retry_later(peer, now_ns, errno == ECONNREFUSED ? "connection refused" : std::strerror(errno));
}

void MeshSetup::finish_connect(std::size_t peer, std::int64_t now_ns) {
  Call& call = calls_[peer];
  pollfd connected{call.socket.get(), POLLOUT, 0};
  if (::poll(&connected, 1, 0) == 0) {
    if (now_ns - call.since_ns > kConnectMs * kMsInNs) {
      retry_later(peer, now_ns, "no answer in " + in_seconds(now_ns - call.since_ns));
    }
    return;
  }
  int error = 0;
  socklen_t length = sizeof error;
  (void)getsockopt(call.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return retry_later(peer, now_ns, std::strerror(error));
  greet(peer, now_ns);
}

void MeshSetup::greet(std::size_t peer, std::int64_t now_ns) {
  Call& call = calls_[peer];
  call.is_connecting = false;
  call.answer = GreetingReader{};
  send_at_once(call.socket.get());
  if (!send_hello(call.socket.get(), setup_.rank, setup_.run, setup_.token)) {
    retry_later(peer, now_ns, "it closed the connection before our greeting");
  }
}

void MeshSetup::retry_later(std::size_t peer, std::int64_t now_ns, const std::string& seen) {
  Call& call = calls_[peer];
  call.socket.close();
  call.is_connecting = false;
  const std::string at = call.where[call.next_where].family() == AF_UNIX
                             ? "its Unix socket" : tcp_text(call.where[call.next_where]);
  if (call.next_where == 0) call.seen.clear();
  call.seen += (call.seen.empty() ? "" : ", ") + (call.where.size() > 1 ? at + ": " : "") + seen;
  call.next_where = (call.next_where + 1) % call.where.size();
  call.next_attempt_ns = now_ns;
  if (call.next_where > 0) return;  // another address to try, at once
  call.next_attempt_ns += call.retry_ms * kMsInNs;
  call.retry_ms = std::min(2 * call.retry_ms, kLongestRetryMs);
}

void MeshSetup::read_answer(std::size_t peer, std::int64_t now_ns) {
  Call& call = calls_[peer];
  const MessageHeader& header = call.answer.header();
  switch (call.answer.read(call.socket.get(), setup_.token)) {
    case GreetingReader::Outcome::kIncomplete:
      return;
    case GreetingReader::Outcome::kGone:
    case GreetingReader::Outcome::kStranger:
      return retry_later(peer, now_ns, call.answer.seen());
    case GreetingReader::Outcome::kRefusal:
      return fail(StatusCode::kProtocol, static_cast<std::int32_t>(peer),
                  peer_name(peer) + " refuses " + me() + ": " + call.answer.text());
    case GreetingReader::Outcome::kHello:
      break;
  }
  if (header.version != kWireVersion || header.run != setup_.run ||
      header.source_rank != static_cast<std::int32_t>(peer)) {
    return fail(StatusCode::kProtocol, static_cast<std::int32_t>(peer),
                peer_name(peer) + " answered as rank " + std::to_string(header.source_rank) +
                    " with wire version " + std::to_string(header.version) + ", but " + me() +
                    " expects rank " + std::to_string(peer) + " of the same pipeline with wire "
                    "version " + std::to_string(kWireVersion) +
                    ". Install the same version of rrfp everywhere and restart.");
  }
  connections_[peer] = std::move(call.socket);
}

// Over TCP the hello may still be on its way when its connection is accepted.
bool MeshSetup::has_room(std::int64_t now_ns) const {
  return arrivals_.size() < kMaxStrangers ||
         now_ns - arrivals_.front().since_ns > kGreetingMs * kMsInNs;
}

void MeshSetup::accept_arrivals(std::int64_t now_ns) {
  for (const Descriptor& socket : listener_.sockets()) {
    for (int i = 0; i < kAcceptsPerTurn && accept_one(socket, now_ns); ++i) {
    }
  }
}

// False when there is nobody, or no room.
bool MeshSetup::accept_one(const Descriptor& listening, std::int64_t now_ns) {
  if (!is_unix_socket(listening.get()) && !has_room(now_ns)) return false;
  Descriptor socket = Descriptor::open([&listening] {
    return ::accept4(listening.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  });
  const bool too_many = !socket && (errno == EMFILE || errno == ENFILE);
  if (too_many && arrivals_.empty()) {
    throw std::system_error(errno, std::generic_category(), "rrfp: accepting a peer");
  }
  if (!socket && !too_many) return false;
  if (too_many || arrivals_.size() == kMaxStrangers) {
    turn_away("it said nothing for too long");
    arrivals_.erase(arrivals_.begin());
  }
  if (too_many) return true;
  send_at_once(socket.get());
  arrivals_.push_back(Arrival{std::move(socket), now_ns, {}});
  // Over a Unix socket a peer's hello is there before we accept: a crowd of silent strangers
  // cannot push it out.
  if (is_settled(arrivals_.back())) arrivals_.pop_back();
  return true;
}

void MeshSetup::read_arrivals() {
  std::erase_if(arrivals_, [this](Arrival& arrival) { return is_settled(arrival); });
}

// True when the arrival is a peer now, or was turned away.
bool MeshSetup::is_settled(Arrival& arrival) {
  const auto outcome = arrival.greeting.read(arrival.socket.get(), setup_.token);
  if (outcome == GreetingReader::Outcome::kIncomplete) return false;
  if (outcome != GreetingReader::Outcome::kHello) {
    turn_away(outcome == GreetingReader::Outcome::kRefusal ? "it refused before we called"
                                                           : arrival.greeting.seen());
    return true;
  }
  const MessageHeader& hello = arrival.greeting.header();
  const std::string refusal = refusal_of(hello);
  if (!refusal.empty()) {
    turn_away(refusal);
    send_refusal(arrival.socket.get(), setup_.rank, setup_.run, setup_.token, refusal);
    // It has the token, so it is a peer of another version: waiting longer would not help.
    if (hello.version != kWireVersion) fail(StatusCode::kProtocol, hello.source_rank, refusal);
    return true;
  }
  if (!send_hello(arrival.socket.get(), setup_.rank, setup_.run, setup_.token)) {
    turn_away("it closed the connection before our greeting");
    return true;
  }
  connections_[static_cast<std::size_t>(hello.source_rank)] = std::move(arrival.socket);
  return true;
}

// Why a connection with the right token is not taken; empty: it is.
std::string MeshSetup::refusal_of(const MessageHeader& hello) const {
  const std::string caller = "the caller, rank " + std::to_string(hello.source_rank) + ",";
  if (hello.version != kWireVersion) {
    return caller + " speaks wire version " + std::to_string(hello.version) + ", " + me() +
           " speaks " + std::to_string(kWireVersion) +
           ". Install the same version of rrfp everywhere and restart.";
  }
  if (hello.run != setup_.run) return caller + " belongs to another pipeline of this run";
  if (hello.source_rank <= setup_.rank ||
      hello.source_rank >= static_cast<std::int32_t>(connections_.size())) {
    return caller + " is not one of the ranks " + std::to_string(setup_.rank + 1) + " to " +
           std::to_string(connections_.size() - 1) + " that call " + me();
  }
  if (connections_[static_cast<std::size_t>(hello.source_rank)]) {
    return caller + " is connected already: two processes have this rank";
  }
  return {};
}

void MeshSetup::turn_away(const std::string& why) {
  ++num_turned_away_;
  turned_away_because_ = why;
}

// Until something may have changed, the next attempt is due, or interrupted() is to be asked.
void MeshSetup::wait(std::int64_t now_ns) {
  std::vector<pollfd> watched;
  for (const Descriptor& socket : listener_.sockets()) {
    const int fd = socket.get();
    if (is_unix_socket(fd) || has_room(now_ns)) watched.push_back({fd, POLLIN, 0});
  }
  std::int64_t until_ns = now_ns + kAskMs * kMsInNs;
  for (std::size_t peer = 0; peer < calls_.size(); ++peer) {
    if (connections_[peer]) continue;
    if (calls_[peer].socket) {
      watched.push_back({calls_[peer].socket.get(),
                         static_cast<short>(calls_[peer].is_connecting ? POLLOUT : POLLIN), 0});
    } else {
      until_ns = std::min(until_ns, calls_[peer].next_attempt_ns);
    }
  }
  for (const Arrival& arrival : arrivals_) watched.push_back({arrival.socket.get(), POLLIN, 0});
  const std::int64_t left_ms = std::max<std::int64_t>(until_ns - now_ns, 0) / kMsInNs + 1;
  (void)::poll(watched.data(), watched.size(), static_cast<int>(left_ms));
}

void MeshSetup::fail(StatusCode code, std::int32_t origin_rank, const std::string& message) {
  if (status_.ok()) status_ = Status{code, origin_rank, message};
}

std::string MeshSetup::missing_peers(std::int64_t now_ns) const {
  std::string text;
  for (std::size_t peer = 0; peer < connections_.size(); ++peer) {
    if (connections_[peer] || peer == static_cast<std::size_t>(setup_.rank)) continue;
    if (!text.empty()) text += "; ";
    text += peer_name(peer) + ": ";
    if (peer >= calls_.size()) {
      text += "it has not connected";
    } else if (calls_[peer].is_connecting) {
      text += "no answer to the connection at " +
              tcp_text(calls_[peer].where[calls_[peer].next_where]) +
              (calls_[peer].seen.empty() ? "" : ", before that " + calls_[peer].seen);
    } else if (calls_[peer].socket) {
      text += "connected, but it has not answered";
    } else {
      text += std::to_string(calls_[peer].num_attempts) + " attempts, the last one: " +
              calls_[peer].seen;
    }
  }
  if (num_turned_away_ > 0) {
    text += "; " + std::to_string(num_turned_away_) +
            " other connections were turned away, the last because " + turned_away_because_;
  }
  return text + " (after " + in_seconds(now_ns - start_ns_) + ")";
}

}  // namespace

std::unique_ptr<Transport> connect_sockets(SocketListener& listener, const SocketSetup& setup,
                                           Status* status) {
  const auto num_ranks = static_cast<std::int32_t>(setup.addresses.size());
  RRFP_CHECK(setup.rank >= 0 && setup.rank < num_ranks,
             "rank " + std::to_string(setup.rank) + " is not one of the " +
                 std::to_string(num_ranks) + " ranks whose addresses were given");
  for (const std::string& address : setup.addresses) {
    RRFP_CHECK(!parse_addresses(address).empty(),
               "\"" + address + "\" is no address of a listener; expected unix:<name> or "
               "tcp:<host>:<port>");
  }
  return MeshSetup(listener, setup).run(status);
}

}  // namespace rrfp
