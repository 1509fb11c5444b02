// A CUDA runtime made of threads, so that the device channels can be tested, also under
// ThreadSanitizer, where no GPU is. Two devices; "device memory" is shared host memory; every
// stream is a thread that runs what is enqueued, in order, each after a random delay. It is
// linked in place of the CUDA runtime, and implements only what csrc/device, csrc/comm and
// these tests call.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "fake_cuda/fake_stream.hpp"

using rrfp::test::FakeStream;
using rrfp::test::stream_of;

namespace {

constexpr int kNumDevices = 2;

thread_local int current_device = 0;

// Shared with the work that was enqueued: an event may be destroyed before it has passed.
struct EventState {
  std::atomic<std::uint64_t> recorded{0};
  std::atomic<std::uint64_t> passed{0};
};
using FakeEvent = std::shared_ptr<EventState>;

FakeEvent& event_of(cudaEvent_t event) { return *reinterpret_cast<FakeEvent*>(event); }

struct Memory {
  int fd = -1;
  std::size_t bytes = 0;
};
std::mutex memory_mutex;
std::map<void*, Memory> memories;

struct FakeHandle {
  int pid;
  int fd;
  std::size_t bytes;
};
static_assert(sizeof(FakeHandle) <= sizeof(cudaIpcMemHandle_t));

CUresult CUDAAPI write_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  auto* word = reinterpret_cast<std::uint32_t*>(address);
  stream_of(stream).enqueue([word, value] { __atomic_store_n(word, value, __ATOMIC_RELEASE); });
  return CUDA_SUCCESS;
}

CUresult CUDAAPI wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  const auto* word = reinterpret_cast<const std::uint32_t*>(address);
  stream_of(stream).enqueue([word, value] {
    while (static_cast<std::int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0) {
      std::this_thread::yield();
    }
  });
  return CUDA_SUCCESS;
}

void* map_memory(int fd, std::size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return base == MAP_FAILED ? nullptr : base;
}

}  // namespace

extern "C" {

cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { *count = kNumDevices; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kNumDevices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "a fake error"; }
const char* cudaGetErrorString(cudaError_t) { return "a fake error"; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** base, std::size_t bytes) {
  Memory memory{memfd_create("fake device", MFD_CLOEXEC), bytes};
  if (memory.fd < 0 || ftruncate(memory.fd, static_cast<off_t>(bytes)) != 0) {
    return cudaErrorMemoryAllocation;
  }
  *base = map_memory(memory.fd, bytes);
  std::lock_guard lock(memory_mutex);
  memories[*base] = memory;
  return cudaSuccess;
}

cudaError_t cudaFree(void* base) {
  if (base == nullptr) return cudaSuccess;
  std::lock_guard lock(memory_mutex);
  const auto found = memories.find(base);
  if (found == memories.end()) return cudaErrorInvalidValue;
  munmap(base, found->second.bytes);
  close(found->second.fd);
  memories.erase(found);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* base) {
  std::lock_guard lock(memory_mutex);
  const Memory& memory = memories.at(base);
  const FakeHandle fake{getpid(), memory.fd, memory.bytes};
  std::memcpy(handle, &fake, sizeof fake);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** base, cudaIpcMemHandle_t handle, unsigned) {
  FakeHandle fake{};
  std::memcpy(&fake, &handle, sizeof fake);
  if (fake.pid == getpid()) return cudaErrorInvalidValue;
  const std::string path = "/proc/" + std::to_string(fake.pid) + "/fd/" + std::to_string(fake.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  *base = fd < 0 ? nullptr : map_memory(fd, fake.bytes);
  if (*base == nullptr) return cudaErrorMapBufferObjectFailed;
  std::lock_guard lock(memory_mutex);
  memories[*base] = {fd, fake.bytes};
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* base) { return cudaFree(base); }

cudaError_t cudaHostAlloc(void** base, std::size_t bytes, unsigned) {
  *base = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::memset(*base, 0, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* base) { std::free(base); return cudaSuccess; }
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** address, void* host, unsigned) {
  *address = host;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(new FakeStream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<FakeStream*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream_of(stream).is_idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream).synchronize();
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  stream_of(stream).enqueue([to, from, bytes] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  stream_of(stream).enqueue([to, value, bytes] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new FakeEvent(std::make_shared<EventState>()));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<FakeEvent*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const FakeEvent of = event_of(event);
  const std::uint64_t number = ++of->recorded;
  stream_of(stream).enqueue([of, number] { of->passed = number; });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event_of(event)->passed == event_of(event)->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const FakeEvent of = event_of(event);
  const std::uint64_t number = of->recorded;
  stream_of(stream).enqueue([of, number] {
    while (of->passed < number) std::this_thread::yield();
  });
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = std::string(name) == "cuStreamWaitValue32"
                  ? reinterpret_cast<void*>(&wait_value)
                  : reinterpret_cast<void*>(&write_value);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
