// The harness of the C++ tests: checks that never compile out, named cases, a seed.
//
//   TEST_CASE(name) { CHECK(a == b); CHECK_THROWS_WITH(call(), "part of the message"); }
//   int main(int argc, char** argv) { return rrfp::test::run(argc, argv); }
//
// A program runs all its cases, or those whose name contains argv[1]. RRFP_SEED overrides the
// seed that seed() returns; a failing case prints it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace rrfp::test {

// Where everything takes ten times as long, fewer rounds do.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderTsan = true;
#else
inline constexpr bool kUnderTsan = false;
#endif

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* text = std::getenv("RRFP_SEED");
    return text ? std::strtoull(text, nullptr, 10) : 20260518ULL;
  }();
  return value;
}

inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s (RRFP_SEED=%llu)\n", file, line, what.c_str(),
               static_cast<unsigned long long>(seed()));
  ++failures();
}

inline int run(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  int ran = 0;
  for (const Case& test : cases()) {
    if (std::string(test.name).find(wanted) == std::string::npos) continue;
    const int before = failures();
    try {
      test.body();
    } catch (const std::exception& error) {
      fail(test.name, 0, std::string("threw: ") + error.what());
    }
    std::printf("%-60s %s\n", test.name, failures() == before ? "ok" : "FAILED");
    ++ran;
  }
  std::printf("%d cases, %d failures, seed %llu\n", ran, failures(),
              static_cast<unsigned long long>(seed()));
  return failures() == 0 && ran > 0 ? 0 : 1;
}

}  // namespace rrfp::test

#define TEST_CASE(name)                                              \
  static void name();                                                \
  static ::rrfp::test::Register register_##name(#name, name);        \
  static void name()

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) ::rrfp::test::fail(__FILE__, __LINE__, "does not hold: " #condition);  \
  } while (false)

#define CHECK_THROWS_WITH(expression, part)                                                  \
  do {                                                                                       \
    try {                                                                                    \
      (void)(expression);                                                                    \
      ::rrfp::test::fail(__FILE__, __LINE__, "did not throw: " #expression);                 \
    } catch (const std::exception& caught) {                                                 \
      if (std::string(caught.what()).find(part) == std::string::npos)                        \
        ::rrfp::test::fail(__FILE__, __LINE__,                                               \
                           std::string("threw other words: ") + caught.what());              \
    }                                                                                        \
  } while (false)
