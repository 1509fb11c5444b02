#include "python/rank_views.hpp"

#include <string>

namespace py = pybind11;

namespace rrfp::python {

namespace {

const char* activity_name(Activity activity) {
  switch (activity) {
    case Activity::kOutside: return "outside";
    case Activity::kEntering: return "entering";
    case Activity::kWaiting: return "waiting";
    case Activity::kRunning: return "running";
    case Activity::kTying: return "tying";
  }
  return "unknown";
}

const char* blocked_name(Blocked blocked) {
  switch (blocked) {
    case Blocked::kLimit: return "limit";
    case Blocked::kSlack:
    case Blocked::kHint: return "hint";
    case Blocked::kAgreement: return "agreement";
    default: return "input";
  }
}

py::object or_none(std::int64_t value) {
  return value < 0 ? py::object(py::none()) : py::object(py::int_(value));
}

py::object task_or_none(const Task& task) {
  return task.stage < 0 ? py::object(py::none()) : py::object(py::str(to_text(task)));
}

double seconds(std::int64_t ms) { return static_cast<double>(ms) / 1000; }

py::dict decision_dict(const Decision& decision, std::int64_t now_ns) {
  py::dict entry;
  entry["step"] = decision.step;
  entry["task"] = to_text(Task{decision.stage, decision.kind, decision.microbatch});
  entry["seconds_ago"] = seconds(ago_ns(decision, now_ns) / 1000000);
  entry["num_passed"] = decision.overtaken;
  const Task passed{decision.passed_stage, decision.passed_kind, decision.passed_microbatch};
  entry["passed"] = task_or_none(passed);
  entry["because"] = decision.passed_stage < 0 ? py::object(py::none())
                                               : py::object(py::str(passed_text(decision)));
  return entry;
}

}  // namespace

py::dict view_dict(const RankView& view, std::int64_t now_ns) {
  const RankState& state = view.state;
  const bool is_known = view.is_own || view.has_spoken;
  const bool is_waiting = is_known && state.activity == Activity::kWaiting;
  py::dict entry;
  entry["rank"] = view.rank;
  entry["heard_seconds_ago"] =
      view.is_own ? py::object(py::none()) : py::object(py::float_(seconds(view.heard_ago_ms)));
  entry["activity"] = view.has_left ? "closed"
                      : is_known    ? activity_name(state.activity)
                                    : "silent";
  entry["state"] = view.has_left ? "has closed its pipeline"
                   : is_known    ? to_text(state)
                                 : "was never heard";
  entry["step"] = state.step == kNoStep ? py::object(py::none()) : py::object(py::int_(state.step));
  entry["task"] = task_or_none({state.stage, state.kind, state.microbatch});
  entry["for_seconds"] = seconds(state.since_ms);
  entry["tasks_done"] = state.num_retired;
  entry["blocked_by"] =
      is_waiting ? py::object(py::str(blocked_name(state.blocked))) : py::object(py::none());
  entry["lacks_stage"] = is_waiting ? or_none(state.source_stage) : py::object(py::none());
  entry["lacks_rank"] = is_waiting ? or_none(state.source_rank) : py::object(py::none());
  py::list decisions;
  for (const Decision& decision : view.decisions) decisions.append(decision_dict(decision, now_ns));
  entry["decisions"] = decisions;
  entry["chosen"] = decisions_text(view.decisions, now_ns);
  return entry;
}

}  // namespace rrfp::python
