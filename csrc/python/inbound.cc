#include "python/inbound.hpp"

#include <string>

#include "base/check.hpp"
#include "python/dlpack.hpp"
#include "runtime/rank_runtime.hpp"

namespace py = pybind11;

namespace rrfp::python {

void PayloadLease::release() {
  if (holders_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;  // L1
  RankRuntime::release(message_);
  delete this;
}

namespace {

// What a capsule points to; `managed` comes first only by convention, the context leads back.
struct LeasedTensor {
  DlManagedTensor managed;
  std::vector<std::int64_t> shape;
  PayloadLease* lease;
};

void drop_tensor(DlManagedTensor* managed) {
  auto* tensor = static_cast<LeasedTensor*>(managed->context);
  tensor->lease->release();
  delete tensor;
}

// Runs for capsules that nobody turned into a tensor; a consumer renames those it takes.
void drop_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kDlCapsuleName)) return;
  drop_tensor(static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, kDlCapsuleName)));
}

std::uint64_t bytes_of(const TensorLayout& layout) {
  std::uint64_t elements = 1;
  for (std::int64_t extent : std::get<2>(layout)) {
    RRFP_CHECK(extent >= 0 && (extent == 0 || elements <= kMaxPayloadBytes / extent),
               "a received tensor announces an impossible shape; the message is damaged.");
    elements *= static_cast<std::uint64_t>(extent);
  }
  return elements * std::get<1>(layout) / 8;
}

py::capsule make_capsule(PayloadLease* lease, const TensorLayout& layout, std::byte* data) {
  auto* tensor = new LeasedTensor{{}, std::get<2>(layout), lease};
  lease->share();
  const auto rank = static_cast<std::int32_t>(tensor->shape.size());
  const std::int32_t device = lease->message().device_index;
  tensor->managed = {
      {data, device < 0 ? DlDevice{kDlCpu, 0} : DlDevice{kDlCuda, device}, rank,
       {std::get<0>(layout), std::get<1>(layout), 1}, tensor->shape.data(), nullptr, 0},
      tensor,
      drop_tensor};
  PyObject* capsule = PyCapsule_New(&tensor->managed, kDlCapsuleName, drop_capsule);
  if (capsule == nullptr) {
    drop_tensor(&tensor->managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace

py::bytes Inbound::metadata() const {
  const auto& bytes = lease_->message().metadata;
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::vector<py::capsule> Inbound::capsules(const std::vector<TensorLayout>& layouts) const {
  InboundMessage& message = lease_->message();
  std::vector<py::capsule> result;
  result.reserve(layouts.size());
  std::uint64_t offset = 0;
  for (const TensorLayout& layout : layouts) {
    const std::uint64_t bytes = bytes_of(layout);
    const std::uint64_t padded = (bytes + kPayloadAlignment - 1) / kPayloadAlignment *
                                 kPayloadAlignment;
    RRFP_CHECK(padded <= message.header.payload_bytes - offset,
               "a received message of " + std::to_string(message.header.payload_bytes) +
                   " payload bytes is too short for the tensors it announces.");
    result.push_back(make_capsule(lease_, layout, bytes == 0 ? nullptr : message.payload + offset));
    offset += padded;
  }
  RRFP_CHECK(offset == message.header.payload_bytes,
             "a received message of " + std::to_string(message.header.payload_bytes) +
                 " payload bytes announces tensors of " + std::to_string(offset) + " bytes.");
  return result;
}

}  // namespace rrfp::python
