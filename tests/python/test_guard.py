"""The guard of hint "auto": what it learns from steps, and that it changes no result."""

import dataclasses
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import rrfp
from rrfp import _C
from rrfp.layout import make_layout
from rrfp.settings import read_settings
from rrfp.step_guard import NUM_STEPS, StepGuard, step_record

P, M = 4, 8


def plan_of(waiting=True, slack=None):
    graph = make_layout(P, None, "loop").graph
    slack = _C.AUTO_SLACK if slack is None else slack
    return _C.StepPlan(graph, M, [], "auto", [], slack, [], False, waiting=waiting)


def rows_of_step(plan, clock_ns=(0,) * P, forward_ns=1_000_000, latency_ns=10_000):
    """Every rank's (text, ready, claimed, retired) of a step in which nothing varies."""
    durations = [forward_ns] * (P * M) + [2 * forward_ns] * (P * M)
    world = _C.simulate(plan, durations, [latency_ns] * (2 * P * M), False)
    ends = {text: end for rank in world.ranks for text, _, end in rank}
    rows = []
    for rank, tasks in enumerate(world.ranks):
        rows.append([])
        for text, start, end in tasks:
            _, kind, m = _C.parse_task(text)
            source = f"{rank - 1 if kind == 'F' else rank + 1}{kind}{m}"
            ready = ends[source] + latency_ns if source in ends else 0
            rows[-1].append((text, *(t + clock_ns[rank] for t in (ready, start, end))))
    return rows


@pytest.mark.parametrize("clocks", [(0, 0, 0, 0), (0, 10**15, -(10**12), 77)])
def test_records_do_not_depend_on_the_clocks_of_the_ranks(clocks):
    num_microbatches, durations, travels, costs = step_record(
        P, rows_of_step(plan_of(), clocks), [])
    assert (num_microbatches, costs) == (M, [])
    per_kind = P * M
    assert set(durations[:per_kind]) == {1_000_000}
    assert set(durations[per_kind:2 * per_kind]) == {2_000_000}
    assert set(durations[2 * per_kind:]) == {-1}
    forwards = travels[:per_kind]
    assert set(forwards[:-M]) == {10_000} and set(forwards[-M:]) == {-1}
    backwards = travels[per_kind:2 * per_kind]
    assert set(backwards[M:]) == {10_000} and set(backwards[:M]) == {-1}


@dataclasses.dataclass(frozen=True)
class Decided:
    hint: str = "auto"
    slack: int = _C.AUTO_SLACK
    microbatch_order: tuple = ()
    weights: tuple = ()
    seed: int = 0
    costs: tuple = ()
    gathers_times: bool = False
    limits: tuple = ()


def test_the_choice_comes_after_eight_steps_and_is_the_cores():
    plan = plan_of()
    guard = StepGuard(make_layout(P, None, "loop"))
    rows = rows_of_step(plan)
    for _ in range(NUM_STEPS):
        decided = guard.decide(Decided())
        assert decided == dataclasses.replace(Decided(), gathers_times=True)
        guard.learn(plan, (), rows)
        guard.wait(60)
    records = [step_record(P, rows, [])] * NUM_STEPS
    hint, slack = _C.guard(plan, records, [], NUM_STEPS)
    decided = guard.decide(Decided())
    if hint == "auto":
        assert (decided.hint, decided.slack) == ("auto", _C.AUTO_SLACK)
    else:
        assert (decided.hint, decided.slack) == (hint, slack)
    # Another limit is another question.
    assert guard.decide(Decided(limits=(4, 4, 4, 4))).hint == "auto"


def test_a_record_that_makes_no_sense_leaves_the_rule(caplog):
    guard = StepGuard(make_layout(P, None, "loop"))
    with caplog.at_level(logging.ERROR, logger="rrfp"):
        guard.decide(Decided())
        guard.learn(plan_of(), (), [[("0X0", 0, 1, 2)]])
        guard.wait(60)
    assert "could not choose" in caplog.text
    assert guard.decide(Decided()).hint == "auto"


def test_a_guard_that_gets_no_thread_leaves_the_rule(monkeypatch, caplog):
    """The other ranks have returned from the step when it begins to learn."""
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    guard = StepGuard(make_layout(P, None, "loop"))
    guard.decide(Decided())
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="rrfp"):
        patched.setattr(threading.Thread, "start", refuse)
        guard.learn(plan_of(), (), rows_of_step(plan_of()))
    guard.wait(60)
    assert "could not choose; the rule goes on: can't start new thread" in caplog.text
    assert guard.decide(Decided()).hint == "auto"


USED_UP = """
import resource, time, torch, rrfp
batch = [torch.ones(2, 4)] * 4
pipeline = rrfp.Pipeline([torch.nn.Linear(4, 4) for _ in range(2)])
for number in range(5):
    if number == 2:
        time.sleep(0.3)
        num_pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize(), -1))
    pipeline.step(batch, batch, torch.nn.functional.mse_loss)
print("5 steps")
"""


def test_no_step_waits_for_a_thread_that_dies_of_no_memory():
    done = subprocess.run([sys.executable, "-c", USED_UP], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    # An error is as good: of what a step takes itself.
    assert done.stdout == "5 steps\n" or "Error" in done.stderr, done.stderr[-3000:]


def test_a_pipeline_may_be_closed_in_the_thread_of_its_guard(monkeypatch, caplog):
    inputs = list(torch.randn(M, 4, 8))
    with rrfp.Pipeline([torch.nn.Linear(8, 8) for _ in range(P)]) as pipeline:
        guard = pipeline._session._guard
        closed = threading.Event()

        def close(*_):
            pipeline.close()  # as a finalizer may, of an object that is collected there
            closed.set()

        for _ in range(NUM_STEPS - 1):
            pipeline.step(inputs, inputs, torch.nn.functional.mse_loss)
            guard.wait(60)
        monkeypatch.setattr(_C, "guard", close)
        try:
            pipeline.step(inputs, inputs, torch.nn.functional.mse_loss)
        except rrfp.ClosedError:
            pass  # the thread was quicker than the end of the step
        guard.wait(60)
    assert closed.is_set() and not caplog.records


def test_steps_under_the_guard_give_the_same_losses_and_gradients():
    torch.manual_seed(0)
    stages = [torch.nn.Linear(8, 8) for _ in range(P)]
    inputs = [torch.randn(4, 8) for _ in range(M)]
    targets = [torch.randn(4, 8) for _ in range(M)]
    seen = []
    with rrfp.Pipeline(stages) as pipeline:
        for _ in range(NUM_STEPS + 3):
            for stage in stages:
                stage.zero_grad()
            result = pipeline.step(inputs, targets, torch.nn.functional.mse_loss)
            seen.append((torch.stack(result.losses), stages[0].weight.grad.clone()))
    for losses, grad in seen[1:]:
        torch.testing.assert_close(losses, seen[0][0])
        torch.testing.assert_close(grad, seen[0][1])


@pytest.mark.parametrize(
    ("choice", "ran", "logged"),
    [
        (("1f1b", 2), "auto (guard: 1f1b, slack 2)", "1f1b, slack 2, run from now on"),
        (("1f1b", 0), "auto (guard: 1f1b, slack 0)", "1f1b, slack 0, run from now on"),
        (("auto", _C.UNLIMITED), "auto", "its rule run from now on"),
    ],
)
def test_report_and_log_name_what_the_guard_chose(choice, ran, logged, monkeypatch, caplog):
    monkeypatch.setattr(_C, "guard", lambda *_: choice)
    inputs = list(torch.randn(M, 4, 8))
    with (rrfp.Pipeline([torch.nn.Linear(8, 8) for _ in range(P)]) as pipeline,
          caplog.at_level(logging.INFO, logger="rrfp")):
        for _ in range(NUM_STEPS):
            report = pipeline.step(inputs, inputs, torch.nn.functional.mse_loss).report
            pipeline._session._guard.wait(60)
            assert report.hint == "auto"
        report = pipeline.step(inputs, inputs, torch.nn.functional.mse_loss).report
    assert report.hint == ran and f"\nhint {ran}" in str(report)
    assert logged in caplog.text and "slack -1" not in caplog.text


def test_guard_and_waiting_can_be_switched_off():
    assert read_settings({}).guard and read_settings({}).waiting
    settings = read_settings({"RRFP_GUARD": "off", "RRFP_WAITING": "off"})
    assert not settings.guard and not settings.waiting
    with pytest.raises(ValueError, match="RRFP_GUARD is 'no'; it must be on or off"):
        read_settings({"RRFP_GUARD": "no"})
