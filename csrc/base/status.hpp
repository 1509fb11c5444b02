// Status: what the data path returns instead of throwing. The first one that ends a step is
// kept and raised on the worker at its next call; every rank gets the same one.
#pragma once

#include <cstdint>
#include <string>

namespace rrfp {

enum class StatusCode : std::uint8_t {
  kOk = 0,
  kStageFailed = 1,   // an exception in a stage, loss or callback (origin_rank says where)
  kPeerLost = 2,      // a process died, or was not heard from for too long
  kStalled = 3,       // nothing could run anywhere for stall_timeout_s
  kProtocol = 4,      // a malformed, foreign or duplicated message from a member of the run
  kInterrupted = 5,   // Ctrl-C or SIGTERM on origin_rank
  kClosed = 6,        // a rank closed its pipeline while others were in, or entering, a step
  kTimedOut = 7,      // a rank did not enter the step, or set-up did not finish, in time
  kDeviceFailed = 8,  // a CUDA or NCCL call gave an error, which the message names
};

struct Status {
  StatusCode code = StatusCode::kOk;
  std::int32_t origin_rank = -1;  // the rank it is about: where it happened, who is lost or late;
                                  // where no one rank is, the one that first saw it; -1: not known
  std::string message;            // for people: what happened, where, what to do

  bool ok() const { return code == StatusCode::kOk; }
};

}  // namespace rrfp
