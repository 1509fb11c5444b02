// The kernels of the tests, on the streams of the fake CUDA runtime.
#include "fake_cuda/fake_stream.hpp"
#include "gpu/gpu_load.hpp"

namespace rrfp::test {

namespace {
std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::steady_clock::now().time_since_epoch().count());
}
}  // namespace

void launch_fill(void* stream, std::uint32_t* words, std::uint64_t num_words,
                 std::uint32_t seed) {
  stream_of(stream).enqueue([=] {
    for (std::uint64_t i = 0; i < num_words; ++i) words[i] = payload_word(seed, i);
  });
}

void launch_check(void* stream, const std::uint32_t* words, std::uint64_t num_words,
                  std::uint32_t seed, unsigned long long* num_wrong) {
  stream_of(stream).enqueue([=] {
    unsigned long long wrong = 0;
    for (std::uint64_t i = 0; i < num_words; ++i) wrong += words[i] != payload_word(seed, i);
    __atomic_fetch_add(num_wrong, wrong, __ATOMIC_RELAXED);
  });
}

void launch_busy(void* stream, std::int64_t duration_us) {
  stream_of(stream).enqueue(
      [duration_us] { std::this_thread::sleep_for(std::chrono::microseconds(duration_us)); });
}

void launch_stamp(void* stream, std::uint64_t* stamp) {
  stream_of(stream).enqueue([stamp] { __atomic_store_n(stamp, now_ns(), __ATOMIC_RELEASE); });
}

void launch_answer(void* stream, const volatile std::uint32_t* go, std::uint64_t* stamp) {
  stream_of(stream).enqueue([go, stamp] {
    while (*go == 0) std::this_thread::yield();
    __atomic_store_n(stamp, now_ns(), __ATOMIC_RELEASE);
  });
}

}  // namespace rrfp::test
