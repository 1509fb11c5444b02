// Two checks, both on in release builds.
//   RRFP_CHECK      the caller gave something wrong: throws UserError, nothing has started.
//   RRFP_INVARIANT  rrfp is wrong: prints where and aborts, because going on could corrupt
//                   gradients without a sign.
#pragma once

#include <stdexcept>
#include <string>

namespace rrfp {

class UserError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

[[noreturn]] void invariant_broken(const char* condition, const char* file, int line,
                                   const std::string& detail);

}  // namespace rrfp

#define RRFP_CHECK(condition, message)                   \
  do {                                                   \
    if (!(condition)) throw ::rrfp::UserError(message);  \
  } while (false)

#define RRFP_INVARIANT(condition, detail)                                          \
  do {                                                                             \
    if (!(condition))                                                              \
      ::rrfp::invariant_broken(#condition, __FILE__, __LINE__, detail);            \
  } while (false)
