// SimNetwork: a virtual clock and the connections between simulated ranks, as sockets are: bytes
// of one direction in order, judged by header_check, ended by a broken one. Payloads take their
// own time, as on a data channel, so that messages overtake one another.
//
// Everything is a function of the seeds. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "comm/header_check.hpp"
#include "comm/transport.hpp"
#include "faults.hpp"

namespace rrfp::test {

inline constexpr std::uint64_t kSimRun = 0xabcdef;
inline std::int64_t& virtual_ns() {
  thread_local std::int64_t now_ns = 0;
  return now_ns;
}
inline std::int64_t read_virtual_clock() { return virtual_ns(); }

// The clock and what happens when. Events of one instant come in the order made.
class SimEvents {
 public:
  void at(std::int64_t at_ns, std::int32_t rank, std::function<void()> what) {
    events_.push({std::max(at_ns, virtual_ns()), num_events_++, rank, std::move(what)});
  }
  bool empty() const { return events_.empty(); }
  std::int64_t next_ns() const { return events_.top().at_ns; }
  // Runs one; returns the rank it is of.
  std::int32_t run_one() {
    const Event event = events_.top();
    events_.pop();
    virtual_ns() = event.at_ns;
    event.what();
    return event.rank;
  }

 private:
  struct Event {
    std::int64_t at_ns;
    std::int64_t number;
    std::int32_t rank;
    std::function<void()> what;
    bool operator<(const Event& other) const {  // priority_queue pops the greatest
      return at_ns != other.at_ns ? at_ns > other.at_ns : number > other.number;
    }
  };
  std::priority_queue<Event> events_;
  std::int64_t num_events_ = 0;
};

inline constexpr std::int64_t kOnArrival = -1;

struct NetworkModel {
  std::function<std::int64_t(const Task& from)> latency_ns;  // of payloads
  std::function<std::int64_t()> control_latency_ns;          // of everything else
  bool fifo_payloads = false;
  Fault fault;
  // Broken on purpose, for the mutants.
  std::int32_t forgotten_rank = -1;   // hears of no abort and no goodbye
  bool stale_is_current = false;      // late messages count as the current step's
  bool header_is_unchecked = false;
  std::int64_t computed_early_ns = 0;  // what every header is off by; kOnArrival: it says when
};                                     // it came

class SimTransport;

class SimNetwork {
 public:
  SimNetwork(std::int32_t num_ranks, NetworkModel model, SimEvents& events)
      : model(std::move(model)), events(events), endpoints(num_ranks) {}

  struct Link {  // of one direction
    std::uint32_t sent = 0, received = 0;  // sequence numbers
    std::int64_t latest_header_ns = 0, latest_payload_ns = 0;
    bool is_broken = false;
  };
  struct Endpoint {
    SimTransport* transport = nullptr;  // null: gone
    bool is_stopped = false;
    std::vector<std::function<void()>> held;  // what came while it was stopped
    std::uint32_t step = 0;                   // for stale_is_current
  };

  Link& link(std::int32_t from, std::int32_t to) { return links_[{from, to}]; }

  // Runs `what` at the rank, later if it is stopped then.
  void reach(std::int32_t rank, std::int64_t at_ns, std::function<void()> what) {
    events.at(at_ns, rank, [this, rank, what = std::move(what)] {
      Endpoint& endpoint = endpoints[rank];
      if (endpoint.is_stopped) return endpoint.held.push_back(what);
      what();
    });
  }

  void break_connection(std::int32_t rank, std::int32_t peer, const Status& for_rank,
                        const Status& for_peer);
  void kill(std::int32_t rank);
  void resume(std::int32_t rank) {
    endpoints[rank].is_stopped = false;
    for (const auto& what : std::exchange(endpoints[rank].held, {})) what();
  }

  NetworkModel model;
  SimEvents& events;
  std::vector<Endpoint> endpoints;
  std::int64_t live_buffers = 0;   // given to post_recv() and not released
  std::int64_t refused_headers = 0;
  std::int64_t fault_ns = -1;      // when the fault of a message struck

 private:
  std::map<std::pair<std::int32_t, std::int32_t>, Link> links_;
};

// What lies on the wire: a copy, as in a socket's buffer.
struct SimPacket {
  MessageHeader header;
  std::vector<std::byte> metadata;
  std::vector<std::byte> payload;
  bool is_cut = false;            // the connection ends inside it
  std::int64_t payload_ns = 0;    // when its payload is complete
  OutboundMessage* source = nullptr;
};

}  // namespace rrfp::test
