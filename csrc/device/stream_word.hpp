// A word in host memory that a CUDA stream writes when it gets there, that the host polls, and
// that another stream can wait for.
//
// Why words and not events: polling a word costs a cache hit and takes no lock of the CUDA
// driver, while cudaEventQuery from a second thread slows the launches of the first. A word
// may also lie in memory shared with another process.
//
// Values count up modulo 2^32; at most 2^31 - 1 writes are outstanding on one word.
// Edges    D1  the stream's write comes after a system-wide fence of the device; word_reached()
//              loads with acquire. Who sees the value also sees what the stream did before. A
//              stream that waits for the word is in the same position as the host.
#pragma once

#include <cstdint>
#include <string>

namespace rrfp {

// Where to look, and for what. No word: nothing to wait for.
struct WordPoint {
  const std::uint32_t* word = nullptr;
  std::uint32_t value = 0;
  const std::uint32_t* on_device = nullptr;  // the same word for streams; null: only hosts look
};

inline bool word_reached(const WordPoint& point) {
  if (point.word == nullptr) return true;
  const std::uint32_t seen = __atomic_load_n(point.word, __ATOMIC_ACQUIRE);  // D1
  return static_cast<std::int32_t>(seen - point.value) >= 0;
}

// Enqueues the write. `address` is the word as the device sees it; the stream's device must be
// current. Returns why it could not, or nothing.
std::string write_word(void* stream, std::uint32_t* address, std::uint32_t value);

// Makes the stream wait until the point, which has a word for streams, is reached. The stream's
// device must be current. Whoever calls this sees to it that the word is written in the end:
// nothing but the word frees the stream. Returns why it could not, or nothing.
std::string wait_word(void* stream, const WordPoint& point);

// The host reaches the point in the place of a stream that will not: who waits goes on.
inline void reach_word(const WordPoint& point) {
  __atomic_store_n(const_cast<std::uint32_t*>(point.word), point.value, __ATOMIC_RELEASE);  // D1
}

// The device's address of a word in registered or pinned host memory; throws DeviceError.
std::uint32_t* device_address(const std::uint32_t* word);

}  // namespace rrfp
