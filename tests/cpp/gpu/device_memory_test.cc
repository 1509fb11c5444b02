// Receive memory, stream timelines and the handover between ranks of one process.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <random>
#include <set>

#include "base/clock.hpp"
#include "device/cuda_check.hpp"
#include "device/handover.hpp"
#include "device/receive_memory.hpp"
#include "gpu/gpu_load.hpp"
#include "gpu/rank_processes.hpp"

namespace rrfp::test {
namespace {

struct Stream {
  explicit Stream(int on_device = 0) : device(on_device) {
    DeviceGuard guard(device);
    cuda_require(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "create", device);
  }
  ~Stream() { cudaStreamDestroy(handle); }
  void wait() { cuda_require(cudaStreamSynchronize(handle), "synchronize", device); }
  int device;
  cudaStream_t handle = nullptr;
};

// Would catch a point that is reached before the work in front of it, and values out of order.
TEST_CASE(timeline_points_follow_the_stream) {
  Stream stream;
  StreamTimeline timeline(0, stream.handle);
  std::vector<WordPoint> points(20);
  for (WordPoint& point : points) {
    launch_busy(stream.handle, 5000);
    CHECK(timeline.record(&point).empty());
  }
  CHECK(!word_reached(points.back()));
  std::size_t num_reached = 0;
  while (num_reached < points.size()) {
    const std::size_t before = num_reached;
    while (num_reached < points.size() && word_reached(points[num_reached])) ++num_reached;
    for (std::size_t i = 0; i < before; ++i) CHECK(word_reached(points[i]));
  }
  CHECK(word_reached({nullptr, 7}));
}

TEST_CASE(word_values_wrap) {
  std::uint32_t word = 0xffffffff;
  CHECK(word_reached({&word, 0xfffffff0}));
  CHECK(!word_reached({&word, 3}));
  word = 5;
  CHECK(word_reached({&word, 0xfffffff0}));
}

// Would catch slots that overlap, wrong sizes, and memory that grows when sizes repeat.
TEST_CASE(slots_do_not_overlap_and_come_back) {
  const auto memory = ReceiveMemory::create(0, 1 << 20);
  std::mt19937_64 random(seed());
  std::uint64_t reserved_bytes = 0;
  for (int round = 0; round < 200; ++round) {
    std::mt19937_64 sizes(seed());  // the same in every round
    std::vector<ReceiveSlot*> slots;
    std::set<std::pair<std::byte*, std::byte*>> spans;
    for (int i = 0; i < 40; ++i) {
      const std::uint64_t bytes = sizes() % (1 << (sizes() % 22));
      ReceiveSlot* slot = memory->take(bytes);
      CHECK(slot != nullptr && slot->bytes >= bytes);
      CHECK(reinterpret_cast<std::uintptr_t>(slot->data) % 256 == 0);
      slots.push_back(slot);
      spans.insert({slot->data, slot->data + slot->bytes});
    }
    std::byte* end = nullptr;
    for (const auto& [first, last] : spans) {
      CHECK(first >= end);
      end = last;
    }
    std::shuffle(slots.begin(), slots.end(), random);
    for (ReceiveSlot* slot : slots) ReceiveMemory::give_back(slot);
    if (round == 0) reserved_bytes = memory->reserved_bytes();
  }
  CHECK(memory->reserved_bytes() == reserved_bytes);
}

// Would catch a slot that is handed out while the reader's stream may still read it.
TEST_CASE(a_slot_waits_for_its_reader) {
  Stream stream;
  const auto memory = ReceiveMemory::create(0, 4096);
  memory->bind_reader(stream.handle);
  ReceiveSlot* first = memory->take(1000);
  launch_busy(stream.handle, 100000);
  ReceiveMemory::give_back(first);
  ReceiveSlot* second = memory->take(1000);
  CHECK(second != first);
  stream.wait();
  CHECK(memory->take(1000) == first);
}

// Would catch one that is handed out while a stream that the task itself has forked reads it.
TEST_CASE(a_slot_given_back_in_a_task_waits_for_its_end) {
  Stream stream;
  Stream forked;
  const auto memory = ReceiveMemory::create(0, 4096);
  memory->bind_reader(stream.handle);
  ReceiveSlot* first = memory->take(1000);
  memory->begin_task();
  launch_busy(forked.handle, 100000);
  ReceiveMemory::give_back(first);
  stream.wait();
  ReceiveSlot* second = memory->take(1000);
  CHECK(second != first);
  Handover handover;
  handover.follow(0, stream.handle, handover.mark(0, forked.handle));
  memory->end_task();
  CHECK(memory->take(1000) != first);
  stream.wait();
  CHECK(memory->take(1000) == first);
}

// Would catch slots that are lost with a task that never came to its end.
TEST_CASE(a_slot_of_a_failed_task_comes_back) {
  Stream stream;
  const auto memory = ReceiveMemory::create(0, 4096);
  memory->bind_reader(stream.handle);
  ReceiveSlot* first = memory->take(1000);
  memory->begin_task();
  ReceiveMemory::give_back(first);
  memory->bind_reader(stream.handle);
  stream.wait();
  CHECK(memory->take(1000) == first);
}

TEST_CASE(a_payload_outlives_its_memory_object) {
  auto memory = ReceiveMemory::create(0, 4096);
  ReceiveSlot* slot = memory->take(1000);
  const std::weak_ptr<ReceiveMemory> watched = memory;
  memory.reset();
  CHECK(!watched.expired());
  ReceiveMemory::give_back(slot);
  CHECK(watched.expired());
}

// The consumer's stream must not read before the producer's wrote; the host never waits.
TEST_CASE(handover_on_one_device) {
  constexpr std::uint64_t kWords = 1 << 18;
  Stream producer;
  Stream consumer;
  Handover handover;
  void* words = nullptr;
  unsigned long long* num_wrong = nullptr;
  cuda_require(cudaMalloc(&words, kWords * 4), "cudaMalloc", 0);
  cuda_require(cudaHostAlloc(reinterpret_cast<void**>(&num_wrong), 8, cudaHostAllocMapped),
               "cudaHostAlloc", 0);
  *num_wrong = 0;
  for (std::uint32_t i = 0; i < 30; ++i) {
    launch_busy(producer.handle, 2000);
    launch_fill(producer.handle, static_cast<std::uint32_t*>(words), kWords, i);
    const HandoverPoint written = handover.mark(0, producer.handle);
    handover.follow(0, consumer.handle, written);
    launch_check(consumer.handle, static_cast<std::uint32_t*>(words), kWords, i, num_wrong);
    const HandoverPoint read = handover.mark(0, consumer.handle);
    handover.follow(0, producer.handle, read);
    consumer.wait();
    CHECK(handover.passed(written));
    handover.release(written);
    handover.release(read);
  }
  CHECK(*num_wrong == 0);
}

TEST_CASE(copies_between_two_devices) {
  int num_devices = 0;
  cuda_require(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount", -1);
  if (num_devices < 2) return;
  constexpr std::uint64_t kWords = 1 << 20;
  Stream producer(0);
  Stream consumer(1);
  Handover handover;
  void* source = nullptr;
  unsigned long long* num_wrong = nullptr;
  cuda_require(cudaMalloc(&source, kWords * 4), "cudaMalloc", 0);
  cuda_require(cudaHostAlloc(reinterpret_cast<void**>(&num_wrong), 8,
                             cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc", 0);
  *num_wrong = 0;
  const auto memory = ReceiveMemory::create(1, 8 << 20);
  memory->bind_reader(consumer.handle);
  for (std::uint32_t i = 0; i < 30; ++i) {
    ReceiveSlot* slot = memory->take(kWords * 4);
    launch_busy(producer.handle, 500);
    launch_fill(producer.handle, static_cast<std::uint32_t*>(source), kWords, i);
    const HandoverPoint written = handover.mark(0, producer.handle);
    const HandoverPoint copied = handover.copy(slot->data, 1, static_cast<std::byte*>(source),
                                               kWords * 4, written);
    handover.follow(1, consumer.handle, copied);
    handover.follow(0, producer.handle, copied);
    {
      DeviceGuard guard(1);
      launch_check(consumer.handle, reinterpret_cast<std::uint32_t*>(slot->data), kWords, i,
                   num_wrong);
    }
    ReceiveMemory::give_back(slot);
    if (i % 8 == 7) consumer.wait();
    handover.release(written);
    handover.release(copied);
  }
  consumer.wait();
  CHECK(*num_wrong == 0);
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_on_devices(argc, argv); }
