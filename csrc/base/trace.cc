#include "base/trace.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#ifdef RRFP_HAS_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace rrfp {

#ifdef RRFP_HAS_NVTX

namespace {

// Null where no profiler listens.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("rrfp");
  return made;
}

nvtxEventAttributes_t attributes_of(const std::string& name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name.c_str();
  return attributes;
}

}  // namespace

bool is_traced() { return domain() != nullptr; }

void TraceRange::begin(const std::string& name) {
  end();
  if (!is_traced()) return;
  const nvtxEventAttributes_t attributes = attributes_of(name);
  nvtxDomainRangePushEx(domain(), &attributes);
  is_open_ = true;
}

void TraceRange::end() {
  if (is_open_) nvtxDomainRangePop(domain());
  is_open_ = false;
}

TraceSpan begin_span(const std::string& name, std::uint64_t bytes) {
  if (!is_traced()) return 0;
  nvtxEventAttributes_t attributes = attributes_of(name);
  attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  attributes.payload.ullValue = bytes;
  return nvtxDomainRangeStartEx(domain(), &attributes);
}

void end_span(TraceSpan span) {
  if (span != 0) nvtxDomainRangeEnd(domain(), span);
}

void trace_thread_name(const std::string& name) {
  if (is_traced()) {
    nvtxNameOsThreadA(static_cast<std::uint32_t>(syscall(SYS_gettid)), name.c_str());
  }
}

#else

bool is_traced() { return false; }
void TraceRange::begin(const std::string&) {}
void TraceRange::end() {}
TraceSpan begin_span(const std::string&, std::uint64_t) { return 0; }
void end_span(TraceSpan) {}
void trace_thread_name(const std::string&) {}

#endif

}  // namespace rrfp
