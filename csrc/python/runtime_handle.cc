#include "python/runtime_handle.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <numeric>
#include <optional>
#include <thread>

#include "base/check.hpp"
#include "base/clock.hpp"
#include "base/fine_sleep.hpp"
#include "python/gil.hpp"
#include "python/inbound.hpp"
#include "python/rank_views.hpp"
#include "python/status_error.hpp"

namespace py = pybind11;

namespace rrfp::python {

namespace {

// Well below the time of a task that is worth a GPU, and no load on a core.
constexpr std::chrono::microseconds kLookEvery{10};
// It does not sleep in between at first, because the end of a short task is near then, nor shortly
// before the next task is due.
constexpr std::int64_t kLookNs = 50000;

// The reference a message carried, if any, as an object that drops it.
py::object take_reference(void*& slot) {
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(std::exchange(slot, nullptr)));
}

std::uint64_t padded(std::uint64_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

}  // namespace

RuntimeHandle::RuntimeHandle(std::unique_ptr<Transport> transport, const RuntimeOptions& options,
                             std::unique_ptr<ComputeStream> stream,
                             std::unique_ptr<AgreementSegment> agreement)
    : stream_(std::move(stream)),
      runtime_(std::make_unique<RankRuntime>(std::move(transport), options,
                                             std::move(agreement))),
      rank_(runtime_->rank()),
      num_ranks_(runtime_->num_ranks()),
      transport_name_(runtime_->transport().name()),
      shares_address_space_(runtime_->transport().shares_address_space()) {}

RuntimeHandle::~RuntimeHandle() {
  if (runtime_ != nullptr) {
    drain();
    drop_sent();
    const GilRelease nogil;  // leaving the progress thread may wait for it
    runtime_.reset();
  }
  while (spare_ != nullptr) delete std::exchange(spare_, spare_->next);
}

void RuntimeHandle::begin_step(std::shared_ptr<StepPlan> plan, std::uint32_t step,
                               std::int64_t stall_timeout_ms) {
  if (stream_ != nullptr) pace(*plan);
  has_turn_ = false;
  runtime_->begin_step(std::move(plan), step, stall_timeout_ms);
}

template <class Attempt>
bool RuntimeHandle::wait_in_slices(std::int64_t timeout_ms, Attempt attempt) {
  // The first look keeps the GIL: giving it up costs more than most tasks' whole overhead.
  if (attempt(0)) return true;
  const std::int64_t end_ns = steady_now_ns() + timeout_ms * 1000000;
  while (true) {
    const std::int64_t left_ms = (end_ns - steady_now_ns() + 999999) / 1000000;
    if (left_ms <= 0) return false;
    bool done = false;
    {
      const GilRelease nogil;
      done = attempt(std::min(left_ms, kSliceMs));
    }
    drop_sent();
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

void RuntimeHandle::pace(const StepPlan& plan) {
  const TaskTable& table = plan.table(rank_);
  if (pacer_ == nullptr || pacer_->num_chunks() != table.num_chunks()) {
    pacer_ = std::make_unique<LaunchPacer>(table.num_chunks());
  }
  const bool is_fixed = plan.options().slack == 0;
  pacer_->begin_step(
      table, is_fixed && lookahead_ == Lookahead::kJit ? Lookahead::kEager : lookahead_);
}

std::int32_t RuntimeHandle::claim(std::int64_t timeout_ms) {
  drop_sent();
  ClaimResult result;
  bool waited = false;
  const bool decided = wait_in_slices(timeout_ms, [&](std::int64_t slice_ms) {
    waited = slice_ms > 0;
    if (turn_ != nullptr && (has_turn_ || turn_->is_on())) return claim_in_turn(slice_ms, &result);
    result = runtime_->claim(slice_ms);
    return result.outcome != ClaimOutcome::kTimeout;
  });
  if (!decided) return kClaimedNothing;
  if (result.outcome == ClaimOutcome::kAborted) throw StatusError(runtime_->status());
  if (result.outcome == ClaimOutcome::kDone) return kAllClaimed;
  if (pacer_ != nullptr) {
    const TaskTable& table = runtime_->engine().table();
    const std::int32_t task_class = table.class_of(result.local);
    pacer_->claimed(table.kind_of_class(task_class), table.chunk_of_class(task_class),
                    runtime_->engine().record(result.local).claimed_ns, waited);
  }
  return result.local;
}

// A look (slice_ms 0) has the GIL, with which nobody waits for the turn.
bool RuntimeHandle::claim_in_turn(std::int64_t slice_ms, ClaimResult* result) {
  if (slice_ms == 0 && !has_turn_) return false;
  if (slice_ms > 0) give_turn();
  *result = runtime_->claim(slice_ms);
  if (result->outcome == ClaimOutcome::kTask) {
    if (!has_turn_) has_turn_ = turn_->take();
  } else if (result->outcome != ClaimOutcome::kTimeout) {
    give_turn();
  }
  return result->outcome != ClaimOutcome::kTimeout;
}

void RuntimeHandle::give_turn() {
  if (std::exchange(has_turn_, false)) turn_->give();
}

py::list RuntimeHandle::take_inputs(std::int32_t local) {
  if (stream_ != nullptr) stream_->begin_task();
  py::list inputs;
  for (InboundMessage* message : runtime_->take_inputs(local)) {
    if (message == nullptr) {
      inputs.append(py::none());
    } else if (message->attachment != nullptr) {
      inputs.append(take_reference(message->attachment));
      RankRuntime::release(message);
    } else {
      auto inbound = std::make_unique<Inbound>(message);
      if (stream_ != nullptr && !word_reached(message->arrived)) {
        const std::string what = stream_->wait(message->arrived);
        if (!what.empty()) device_failed(what);
        pacer_->waits_for_message();
      }
      inputs.append(std::move(inbound));
    }
  }
  return inputs;
}

OutboundMessage* RuntimeHandle::take_spare() {
  if (spare_ == nullptr) return new OutboundMessage;
  OutboundMessage* message = std::exchange(spare_, spare_->next);
  message->header = {};
  message->metadata.clear();
  message->segments.clear();
  message->computed = {};
  message->next = nullptr;
  return message;
}

void RuntimeHandle::drop_sent() {
  OutboundMessage* message = runtime_->take_sent();
  while (message != nullptr) {
    OutboundMessage* next = message->next;
    take_reference(message->owner);
    take_reference(message->attachment);  // still here: it was never delivered
    message->next = spare_;
    spare_ = message;
    message = next;
  }
}

void RuntimeHandle::post_object(std::int32_t local, std::int32_t target_stage,
                                py::object object) {
  OutboundMessage* message = take_spare();
  message->attachment = object.release().ptr();
  runtime_->post_output(local, target_stage, message);
}

void RuntimeHandle::post_tensors(
    std::int32_t local, std::int32_t target_stage, py::bytes metadata,
    const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& segments, py::object owner) {
  RRFP_CHECK(segments.size() <= kMaxTensors,
             "an output has " + std::to_string(segments.size()) + " tensors; the most is " +
                 std::to_string(kMaxTensors));
  OutboundMessage* message = take_spare();
  const std::string_view bytes = metadata;
  const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
  message->metadata.assign(first, first + bytes.size());
  message->header.metadata_bytes = static_cast<std::uint32_t>(bytes.size());
  message->header.num_tensors = static_cast<std::uint16_t>(segments.size());
  for (const auto& [address, size] : segments) {
    message->segments.push_back({reinterpret_cast<const std::byte*>(address), size});
    message->header.payload_bytes += padded(size);
  }
  if (stream_ != nullptr && !segments.empty()) {
    const std::string what = stream_->record(&message->computed);
    if (!what.empty()) {
      message->next = spare_;
      spare_ = message;
      device_failed(what);
    }
    message->header.place = MemoryPlace::kDevice;
  }
  message->owner = owner.release().ptr();
  runtime_->post_output(local, target_stage, message);
}

void RuntimeHandle::device_failed(const std::string& what) {
  runtime_->abort(
      {StatusCode::kDeviceFailed, rank(), "rank " + std::to_string(rank()) + ": " + what});
  throw StatusError(runtime_->status());
}

void RuntimeHandle::bind_stream(std::uintptr_t stream, Lookahead lookahead) {
  RRFP_CHECK(stream_ != nullptr, "rank " + std::to_string(rank()) + " is on the CPU.");
  launched_.clear();
  lookahead_ = lookahead;
  const std::string what = stream_->bind(reinterpret_cast<void*>(stream));
  if (!what.empty()) device_failed(what);
}

bool RuntimeHandle::wait_launched(std::int64_t timeout_ms) {
  stream_->end_task();
  WordPoint end;
  const std::string what = stream_->record(&end);
  if (!what.empty()) device_failed(what);
  launched_.push_back(end);
  runtime_->launched(end);
  pacer_->launched(steady_now_ns());
  const bool is_reached = wait_in_slices(
      timeout_ms, [&](std::int64_t slice_ms) { return wait_to_choose(slice_ms); });
  if (!runtime_->status().ok()) throw StatusError(runtime_->status());
  // A running task may take longer than the time-out; those before it have ended.
  return is_reached || pacer_->choose_from_ns() != LaunchPacer::kNotBeforeAnEnd;
}

bool RuntimeHandle::wait_to_choose(std::int64_t slice_ms) {
  const std::int64_t begin_ns = steady_now_ns();
  std::optional<FineSleep> fine;  // once for all sleeps of a slice: it costs system calls
  for (std::int64_t now_ns = begin_ns;; now_ns = steady_now_ns()) {
    while (!launched_.empty() && word_reached(launched_.front())) launched_.pop_front();
    pacer_->look(now_ns, launched_.size());
    if (pacer_->may_choose(now_ns) || !runtime_->status().ok()) return true;
    if (now_ns - begin_ns >= slice_ms * kNsPerMs) return false;
    if (now_ns - begin_ns < kLookNs || pacer_->choose_from_ns() - now_ns < kLookNs) {
      std::this_thread::yield();
      continue;
    }
    if (!fine) fine.emplace();
    std::this_thread::sleep_for(kLookEvery);
  }
}

void RuntimeHandle::retire(std::int32_t local) { runtime_->retire(local); }

bool RuntimeHandle::wait_sends(std::int64_t timeout_ms) {
  const bool all_sent = wait_in_slices(timeout_ms, [&](std::int64_t slice_ms) {
    return runtime_->wait_sends(slice_ms) || !runtime_->status().ok();
  });
  if (!runtime_->status().ok()) throw StatusError(runtime_->status());
  drop_sent();
  return all_sent;
}

StepTimes RuntimeHandle::end_step() { return runtime_->end_step(); }

std::vector<std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t, std::int32_t>>
RuntimeHandle::records() const {
  const StepEngine& engine = runtime_->engine();
  std::vector<std::int32_t> locals(engine.table().num_tasks());
  std::iota(locals.begin(), locals.end(), 0);
  std::sort(locals.begin(), locals.end(), [&](std::int32_t a, std::int32_t b) {
    return engine.record(a).claimed_ns < engine.record(b).claimed_ns;
  });
  std::vector<std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t, std::int32_t>>
      result;
  result.reserve(locals.size());
  for (std::int32_t local : locals) {
    const TaskRecord& record = engine.record(local);
    result.emplace_back(to_text(engine.table().task(local)), record.ready_ns, record.claimed_ns,
                        record.retired_ns, record.overtaken);
  }
  return result;
}

std::int32_t RuntimeHandle::peak_units() const { return runtime_->engine().arbiter().peak_units(); }

void RuntimeHandle::send_control(std::int32_t peer, const std::string& body) {
  const auto* first = reinterpret_cast<const std::byte*>(body.data());
  runtime_->send_control(peer, std::vector<std::byte>(first, first + body.size()));
}

py::object RuntimeHandle::recv_control(std::int32_t peer, std::int64_t timeout_ms,
                                       bool is_tying) {
  std::optional<std::vector<std::byte>> body;
  const bool decided = wait_in_slices(timeout_ms, [&](std::int64_t slice_ms) {
    body = runtime_->recv_control(peer, slice_ms, is_tying);
    return body.has_value() || !runtime_->status().ok();
  });
  if (body) return py::bytes(reinterpret_cast<const char*>(body->data()), body->size());
  if (decided) throw StatusError(runtime_->status());
  return py::none();
}

py::object RuntimeHandle::exchange_cards(const std::string& card, std::int64_t timeout_ms) {
  RRFP_CHECK(!card.empty(), "a card for the agreement group is empty");
  const auto* first = reinterpret_cast<const std::byte*>(card.data());
  std::vector<std::byte> unsent(first, first + card.size());
  std::vector<std::vector<std::byte>> cards;
  const bool decided = wait_in_slices(timeout_ms, [&](std::int64_t slice_ms) {
    cards = runtime_->exchange_cards(std::exchange(unsent, {}), slice_ms);
    return !cards.empty() || !runtime_->status().ok();
  });
  if (!decided) return py::none();
  if (cards.empty()) throw StatusError(runtime_->status());
  py::list answer;
  for (const auto& each : cards) {
    answer.append(py::bytes(reinterpret_cast<const char*>(each.data()), each.size()));
  }
  return answer;
}

void RuntimeHandle::abort(StatusCode code, std::int32_t origin_rank, const std::string& message,
                          bool tell_peers) {
  std::lock_guard lock(end_mutex_);
  if (runtime_ != nullptr) runtime_->abort(Status{code, origin_rank, message}, tell_peers);
}

Status RuntimeHandle::status() const {
  std::lock_guard lock(end_mutex_);
  return runtime_ != nullptr ? runtime_->status() : last_status_;
}

std::string RuntimeHandle::describe() const {
  std::lock_guard lock(end_mutex_);
  return runtime_ != nullptr ? runtime_->describe() : "It has ended.";
}

py::list RuntimeHandle::views() const {
  std::vector<RankView> seen;
  {
    // No Python object is made under it: that may collect garbage, whose finalizers let another
    // thread run, which would wait for the mutex with the GIL.
    std::lock_guard lock(end_mutex_);
    if (runtime_ != nullptr) seen = runtime_->views();
  }
  const std::int64_t now_ns = steady_now_ns();
  py::list views;
  for (const RankView& view : seen) views.append(view_dict(view, now_ns));
  return views;
}

void RuntimeHandle::close(std::int64_t timeout_ms) {
  {
    const GilRelease nogil;
    runtime_->close(timeout_ms);
  }
  drain();
  drop_sent();
}

void RuntimeHandle::end(std::int64_t timeout_ms) {
  if (runtime_ == nullptr) return;
  close(timeout_ms);
  std::unique_ptr<RankRuntime> ended;
  {
    std::lock_guard lock(end_mutex_);
    last_status_ = runtime_->status();
    ended = std::move(runtime_);
  }
  const GilRelease nogil;
  ended.reset();
}

void RuntimeHandle::drain() {
  for (InboundMessage* message : runtime_->drain()) {
    take_reference(message->attachment);
    RankRuntime::release(message);
  }
}

}  // namespace rrfp::python
