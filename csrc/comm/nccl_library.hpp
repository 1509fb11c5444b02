// NcclLibrary: the functions of the NCCL that is loaded in this process already (torch brings
// it). rrfp never loads one itself: two copies in a process would each reserve device memory
// and know nothing of one another's kernels.
#pragma once

#include <nccl.h>

#include <string>

namespace rrfp {

struct NcclLibrary {
  int version = 0;  // as NCCL says it: 22809 for 2.28.9
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
};

// Null, and `refusal` set, when no NCCL is loaded, it is too old, or a function is missing.
// The first call that succeeds is remembered.
const NcclLibrary* nccl_library(std::string* refusal);

// "2.28.9"
std::string nccl_version_text(int version);

// What is known to go wrong with this version, for a warning; empty: nothing.
std::string nccl_version_warning(int version);

// "ncclSend to rank 1 answered unhandled cuda error"; empty when it succeeded.
std::string nccl_words(const NcclLibrary& library, ncclResult_t result, const std::string& call);

}  // namespace rrfp
