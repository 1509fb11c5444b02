// What a profiler does to listen to NVTX, for tests: NVTX loads this library by
// NVTX_INJECTION64_PATH. Each call becomes a line in the file named by RRFP_NVTX_LOG:
//     domain NAME | push THREAD NAME | pop THREAD | start ID BYTES NAME | end ID |
//     thread THREAD NAME
#include <nvtx3/nvToolsExt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace {

void say(const char* format, ...) {
  static FILE* const log = std::fopen(std::getenv("RRFP_NVTX_LOG"), "w");
  std::va_list values;
  va_start(values, format);
  if (log != nullptr) std::vfprintf(log, format, values);
  if (log != nullptr) std::fflush(log);
  va_end(values);
}

int thread() { return static_cast<int>(syscall(SYS_gettid)); }

int only_domain = 0;
std::atomic<nvtxRangeId_t> num_spans{0};

nvtxDomainHandle_t create(const char* name) {
  say("domain %s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(&only_domain);
}
int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  say("push %d %s\n", thread(), event->message.ascii);
  return 0;
}
int pop(nvtxDomainHandle_t) {
  say("pop %d\n", thread());
  return 0;
}
nvtxRangeId_t start(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  const nvtxRangeId_t id = ++num_spans;
  say("start %llu %llu %s\n", static_cast<unsigned long long>(id),
      static_cast<unsigned long long>(event->payload.ullValue), event->message.ascii);
  return id;
}
void end(nvtxDomainHandle_t, nvtxRangeId_t id) {
  say("end %llu\n", static_cast<unsigned long long>(id));
}
void name_thread(std::uint32_t id, const char* name) { say("thread %u %s\n", id, name); }

template <class Function>
void put(NvtxFunctionTable table, int index, Function* function) {
  *table[index] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_table) {
  const auto* tables = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable core = nullptr;
  NvtxFunctionTable domains = nullptr;
  unsigned num_core = 0;
  unsigned num_domains = 0;
  if (tables == nullptr ||
      !tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &core, &num_core) ||
      !tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &domains, &num_domains)) {
    return 0;
  }
  put(core, NVTX_CBID_CORE_NameOsThreadA, name_thread);
  put(domains, NVTX_CBID_CORE2_DomainCreateA, create);
  put(domains, NVTX_CBID_CORE2_DomainRangePushEx, push);
  put(domains, NVTX_CBID_CORE2_DomainRangePop, pop);
  put(domains, NVTX_CBID_CORE2_DomainRangeStartEx, start);
  put(domains, NVTX_CBID_CORE2_DomainRangeEnd, end);
  return 1;
}
