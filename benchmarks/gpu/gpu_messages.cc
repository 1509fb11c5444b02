// What a device message costs between two processes, each with a device of its own: from the
// device's clock at the end of the computation to the receiver's CPU knowing that the data is
// there, and the bandwidth of a stream of messages. Idle, and beside kernels of 850 us that fill
// both devices, as large GEMMs do. Every payload is checked word by word.
//
//   RRFP_TEST_CHANNEL=ipc build/gpu_messages
//   RRFP_TEST_CHANNEL=nccl RRFP_TEST_NCCL=/path/to/libnccl.so.2 build/gpu_messages
//
// The device's clock is mapped to the host's by a ping-pong before every message; it is right
// within half of the round trip that is printed.
#include <algorithm>

#include "gpu/device_rank.hpp"

namespace rrfp::test {
namespace {

constexpr std::uint64_t kSizes[] = {4, 64 << 10, 1 << 20, 16 << 20, 128 << 20};
constexpr std::int64_t kBusyUs = 850;
constexpr int kNumIdle = 60;
constexpr int kNumBusy = 40;

// Shared by the two processes: when message number n was known at rank 1.
struct Arrivals {
  std::atomic<std::int64_t> number;
  std::atomic<std::int64_t> known_ns;
};
Arrivals* arrivals = nullptr;

struct Spread {
  double median = 0;
  double p95 = 0;
};

Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values[values.size() * 95 / 100]};
}

// Host time minus device time, in ns; the round trip says how good that is.
class DeviceClock {
 public:
  explicit DeviceClock(void* stream)
      : stream_(stream),
        go_(shared_with_device<std::uint32_t>()),
        stamp_(shared_with_device<std::uint64_t>()) {}

  std::int64_t offset_ns() {
    std::int64_t best_ns = INT64_MAX;
    std::int64_t offset_ns = 0;
    for (int i = 0; i < 5; ++i) {
      __atomic_store_n(go_, 0u, __ATOMIC_RELEASE);
      __atomic_store_n(stamp_, std::uint64_t{0}, __ATOMIC_RELEASE);
      launch_answer(stream_, go_, stamp_);
      std::this_thread::sleep_for(std::chrono::microseconds(30));
      const std::int64_t asked_ns = steady_now_ns();
      __atomic_store_n(go_, 1u, __ATOMIC_RELEASE);
      while (__atomic_load_n(stamp_, __ATOMIC_ACQUIRE) == 0) {
      }
      const std::int64_t answered_ns = steady_now_ns();
      if (answered_ns - asked_ns >= best_ns) continue;
      best_ns = answered_ns - asked_ns;
      offset_ns = (asked_ns + answered_ns) / 2 - static_cast<std::int64_t>(*stamp_);
    }
    round_trips_us.push_back(static_cast<double>(best_ns) / 1000);
    return offset_ns;
  }

  std::vector<double> round_trips_us;

 private:
  void* stream_;
  std::uint32_t* go_;
  std::uint64_t* stamp_;
};

// Keeps the stream of this rank filled with busy kernels while it lives.
class Load {
 public:
  Load(const DeviceRank& rank, bool is_on) {
    if (!is_on) return;
    thread_ = std::thread([this, &rank] {
      cudaSetDevice(rank.device());
      cudaStream_t stream = nullptr;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      StreamTimeline timeline(rank.device(), stream);
      WordPoint points[3];
      for (std::size_t i = 0; !is_ending_; ++i) {
        while (!word_reached(points[i % 3]) && !is_ending_) {
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
        launch_busy(stream, kBusyUs);
        timeline.record(&points[i % 3]);
      }
      cudaStreamSynchronize(stream);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ~Load() {
    is_ending_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::atomic<bool> is_ending_{false};
  std::thread thread_;
};

void wait_known(std::int64_t number) {
  while (arrivals->number.load() < number) {
  }
}

// Rank 0: one message at a time. `is_late`: posted after it was computed, timed from the post.
std::vector<double> send_latencies(DeviceRank& rank, DeviceClock& clock, TestSend& send,
                                   std::uint64_t bytes, bool is_busy, bool is_late,
                                   std::int64_t* number) {
  std::vector<double> latencies_us;
  auto* stamp = shared_with_device<std::uint64_t>();
  const int count = is_busy ? kNumBusy : kNumIdle;
  for (int i = 0; i < count + 3; ++i) {
    const std::int64_t offset_ns = clock.offset_ns();
    *stamp = 0;
    if (is_busy) launch_busy(rank.stream(), kBusyUs);
    std::int64_t posted_ns = 0;
    if (is_late) {
      launch_fill(rank.stream(), reinterpret_cast<std::uint32_t*>(send.memory), bytes / 4, 1);
      rank.num_wrong();  // waits for the stream
      if (is_busy) launch_busy(rank.stream(), kBusyUs);
      posted_ns = steady_now_ns();
      rank.post_computed(1, send, {bytes}, 1);
    } else {
      rank.post(1, send, {bytes}, static_cast<std::uint32_t>(*number), is_busy ? 200 : 60, stamp);
      // The GEMMs that follow.
      for (int k = 0; is_busy && k < 3; ++k) launch_busy(rank.stream(), kBusyUs);
    }
    wait_known(++*number);
    if (!is_late) while (__atomic_load_n(stamp, __ATOMIC_ACQUIRE) == 0) {}
    const std::int64_t computed_ns =
        is_late ? posted_ns : static_cast<std::int64_t>(*stamp) + offset_ns;
    if (i >= 3) {
      latencies_us.push_back(static_cast<double>(arrivals->known_ns.load() - computed_ns) / 1000);
    }
    rank.wait_ended(send);
    rank.num_wrong();
  }
  return latencies_us;
}

double stream_gb_per_s(DeviceRank& rank, std::vector<std::unique_ptr<TestSend>>& sends,
                       std::uint64_t bytes, int count, std::int64_t* number) {
  for (const auto& send : sends) {
    launch_fill(rank.stream(), reinterpret_cast<std::uint32_t*>(send->memory), bytes / 4, 1);
  }
  rank.num_wrong();
  const std::int64_t start_ns = steady_now_ns();
  for (int i = 0; i < count; ++i) {
    TestSend& send = *sends[static_cast<std::size_t>(i) % sends.size()];
    if (i >= static_cast<int>(sends.size())) rank.wait_ended(send);
    rank.post_computed(1, send, {bytes}, 1);
  }
  *number += count;
  wait_known(*number);
  for (const auto& send : sends) rank.wait_ended(*send);
  return static_cast<double>(bytes) * count / static_cast<double>(steady_now_ns() - start_ns);
}

int stream_count(std::uint64_t bytes) { return bytes >= (16u << 20) ? 40 : 200; }

void measure_sender(RankContext& context) {
  DeviceRank rank(context, 512u << 20);
  DeviceClock clock(rank.stream());
  std::vector<std::unique_ptr<TestSend>> sends;
  for (int i = 0; i < 4; ++i) sends.push_back(rank.make_send(kSizes[4]));
  std::int64_t number = 0;
  for (const bool is_busy : {false, true}) {
    for (const std::uint64_t bytes : kSizes) {
      context.meetings->flags[0] = is_busy ? 2 : 1;  // the receiver's load
      const Spread early =
          spread(send_latencies(rank, clock, *sends[0], bytes, is_busy, false, &number));
      const Spread late =
          spread(send_latencies(rank, clock, *sends[0], bytes, is_busy, true, &number));
      double gb_per_s = 0;
      {
        Load load(rank, is_busy);
        gb_per_s = stream_gb_per_s(rank, sends, bytes, stream_count(bytes), &number);
      }
      std::printf("{\"channel\": \"%s\", \"load\": \"%s\", \"bytes\": %llu, "
                  "\"computed_to_known_us\": [%.1f, %.1f], \"posted_to_known_us\": "
                  "[%.1f, %.1f], \"gb_per_s\": %.1f}\n",
                  channel_name().c_str(), is_busy ? "busy" : "idle",
                  static_cast<unsigned long long>(bytes), early.median, early.p95, late.median,
                  late.p95, gb_per_s);
      std::fflush(stdout);
    }
  }
  context.meetings->flags[0] = 3;
  const Spread clock_spread = spread(clock.round_trips_us);
  std::printf("clock round trip us: median %.1f, p95 %.1f\n", clock_spread.median,
              clock_spread.p95);
  const auto ends = context.meet("done");
  std::printf("wrong words: %s\n", ends[1].c_str());
}

void measure_receiver(RankContext& context) {
  DeviceRank rank(context, 512u << 20);
  rank.on_arrival = [](std::int64_t known_ns) {
    arrivals->known_ns = known_ns;
    ++arrivals->number;
  };
  std::unique_ptr<Load> load;
  unsigned num_checked = 0;
  while (context.meetings->flags[0] != 3) {
    if (context.meetings->flags[0] == 2 && !load) load = std::make_unique<Load>(rank, true);
    InboundMessage* message = rank.wait_arrived(20);
    if (message == nullptr) continue;
    // Beside streams of large messages checking each would hold their memory up.
    if (num_checked++ % 4 == 0) {
      rank.check_and_release(message);
    } else {
      message->release(message);
    }
  }
  load.reset();
  const unsigned long long num_wrong = rank.num_wrong();
  CHECK(num_wrong == 0);
  context.meet(std::to_string(num_wrong) + " in every fourth message");
}

void measure(RankContext& context) {
  if (context.rank == 0) {
    measure_sender(context);
  } else {
    measure_receiver(context);
  }
}

TEST_CASE(gpu_messages) {
  void* memory = mmap(nullptr, sizeof(Arrivals), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  arrivals = new (memory) Arrivals{};
  run_ranks(2, measure);
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_on_devices(argc, argv); }
