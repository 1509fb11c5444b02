#include "comm/nccl_library.hpp"

#include <dlfcn.h>

#include <mutex>

namespace rrfp {

namespace {

constexpr int kOldestVersion = 21800;
constexpr int kHangingVersion = 23007;

template <class Function>
void find(void* handle, const char* symbol, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (*function == nullptr) *missing += std::string(missing->empty() ? "" : ", ") + symbol;
}

bool find_all(void* handle, NcclLibrary* library, std::string* refusal) {
  std::string missing;
  find(handle, "ncclGetVersion", &library->get_version, &missing);
  find(handle, "ncclGetUniqueId", &library->get_unique_id, &missing);
  find(handle, "ncclCommInitRankConfig", &library->comm_init_rank_config, &missing);
  find(handle, "ncclCommAbort", &library->comm_abort, &missing);
  find(handle, "ncclCommGetAsyncError", &library->comm_get_async_error, &missing);
  find(handle, "ncclGetErrorString", &library->get_error_string, &missing);
  find(handle, "ncclGroupStart", &library->group_start, &missing);
  find(handle, "ncclGroupEnd", &library->group_end, &missing);
  find(handle, "ncclSend", &library->send, &missing);
  find(handle, "ncclRecv", &library->recv, &missing);
  if (!missing.empty()) {
    *refusal = "the NCCL library in this process lacks " + missing;
    return false;
  }
  if (library->get_version(&library->version) != ncclSuccess ||
      library->version < kOldestVersion || library->version / 10000 != NCCL_MAJOR) {
    *refusal = "the NCCL library in this process is " + nccl_version_text(library->version) +
               "; rrfp needs " + nccl_version_text(kOldestVersion) + " or newer of version " +
               std::to_string(NCCL_MAJOR);
    return false;
  }
  return true;
}

}  // namespace

const NcclLibrary* nccl_library(std::string* refusal) {
  static std::mutex mutex;
  static NcclLibrary library;
  static bool is_found = false;
  std::lock_guard lock(mutex);
  if (is_found) return &library;
  void* handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) {
    *refusal = "no NCCL library is loaded in this process; import a CUDA build of torch first";
    return nullptr;
  }
  is_found = find_all(handle, &library, refusal);
  return is_found ? &library : nullptr;
}

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string nccl_version_warning(int version) {
  if (version != kHangingVersion) return {};
  return "NCCL " + nccl_version_text(version) +
         " is reported to hang with several communicators in one process; another version is "
         "safer";
}

std::string nccl_words(const NcclLibrary& library, ncclResult_t result, const std::string& call) {
  if (result == ncclSuccess) return {};
  return call + " answered " + library.get_error_string(result);
}

}  // namespace rrfp
