#include "base/check.hpp"

#include <cstdio>
#include <cstdlib>

namespace rrfp {

void invariant_broken(const char* condition, const char* file, int line,
                      const std::string& detail) {
  std::fprintf(stderr, "rrfp: a bug in rrfp: %s does not hold at %s:%d. %s\n", condition, file,
               line, detail.c_str());
  std::abort();
}

}  // namespace rrfp
