// Handover: device memory passed between ranks that are threads of one process.
//
// Same device: nothing is copied. The producer marks a point on its stream, the consumer's
// stream follows it before it reads; the host never waits. The consumer keeps the tensor until
// its own stream is past the last read, because the allocator it came from knows only the
// producer's stream.
//     HandoverPoint point = handover.mark(producer_stream);        // producer, at retire
//     handover.follow(consumer_stream, consumer_device, point);    // consumer, at claim
//     handover.release(point);                                     // consumer, afterwards
// Two devices: copy() moves the bytes with a copy engine; it is enqueued behind a marked point
// on a stream of the *source's* device (a copy on the destination's stream is known 9 us
// later), and gives the point at which the copy is done.
//
// A task whose input was only marked is not ready in the sense of the arbiter: where a choice
// depends on what has been *computed*, deliver when passed() says so, or use a StreamTimeline.
//
// Threads  All of it: any; a short lock guards the pool of events.
// Bound    One event for each point that is marked and not released.
// Lifetime Points are released before the Handover ends.
// Cost     mark, follow: an event call each, 1-2 us; a copy: 2-3 us.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace rrfp {

struct HandoverPoint {
  int device = -1;
  void* event = nullptr;
};

class Handover {
 public:
  Handover() = default;
  ~Handover();
  Handover(const Handover&) = delete;
  Handover& operator=(const Handover&) = delete;

  // Throw DeviceError: they run on a worker, whose exceptions end the step everywhere.
  HandoverPoint mark(int device, void* stream);
  void follow(int device, void* stream, const HandoverPoint& point);
  bool passed(const HandoverPoint& point) const;
  HandoverPoint copy(std::byte* target, int target_device, const std::byte* source,
                     std::uint64_t bytes, const HandoverPoint& computed);
  void release(const HandoverPoint& point);

 private:
  struct Edge {
    int source_device = -1;
    int target_device = -1;
    void* stream = nullptr;  // on the source's device
  };
  void* edge_stream(int source_device, int target_device);

  std::mutex mutex_;
  std::vector<HandoverPoint> idle_;
  std::vector<Edge> edges_;
};

// Lets `device` write to and read from `peer` directly. Throws DeviceError when the machine
// does not connect them.
void connect_devices(int device, int peer);

}  // namespace rrfp
