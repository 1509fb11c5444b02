"""What runs when: fixed orders, bounded slack, limits, microbatch orders. The stages' own records
are judged, not rrfp's.

Would catch: a hint ranked upside down, slack counted in the wrong direction, a limit that is
reported but not kept, results handed back in the order of execution.
"""

import functools
import random

import parity_cases
import parity_model as model
import pytest
import torch
from parity_group import worker_group

import rrfp


def run_rank(rank, num_ranks, mode, p, m, delays, options):
    """Logs of the owned stages, and the losses where they are known."""
    stages = [
        model.RecordingStage(
            7,
            s,
            torch.float64,
            model.make_delays(
                random.Random(delays).randrange(99), s, m, "random" if delays else "none"
            ),
        )
        for s in range(p)
    ]
    owned = range(p) if mode == "threads" else [rank]
    own = stages if mode == "threads" else {rank: stages[rank]}
    inputs, targets, costs = model.make_batch(3, 0, m, torch.float64)
    result = rrfp.run_pipeline(
        own,
        inputs if 0 in owned else None,
        targets if p - 1 in owned else None,
        model.squared_error,
        costs=costs,
        stall_timeout_s=30.0,
        **options,
    )
    losses = result.losses and [x.item() for x in result.losses]
    return {s: stages[s].log for s in owned}, losses


def run(mode, p, m, delays=0, **options):
    group = worker_group(1, False) if mode == "threads" else worker_group(p)
    answers = group.values(run_rank, mode, p, m, delays, options)
    logs = {s: log for part, _ in answers for s, log in part.items()}
    return [logs[s] for s in range(p)], answers[-1][1]


MODES = pytest.mark.parametrize("mode", ["threads", "processes"])
COSTS = functools.partial(model.make_batch, 3, 0, dtype=torch.float64)


@MODES
@pytest.mark.parametrize("order", ["given", "mid", "list", "callable"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 2), (4, 9)])
def test_slack_zero_is_the_fixed_order(mode, p, m, order):
    costs = COSTS(num_microbatches=m)[2]
    places = {
        "given": list(range(m)),
        "mid": model.mid_order(costs),
        "list": list(range(m))[::-1],
        "callable": parity_cases.longest_first(costs),
    }[order]
    argument = {"list": places, "callable": parity_cases.longest_first}.get(order, order)
    for hint in ["gpipe", "1f1b"]:
        logs, _ = run(mode, p, m, delays=5, hint=hint, slack=0, microbatch_order=argument)
        for stage, log in enumerate(logs):
            if hint == "gpipe":
                assert log == model.gpipe_texts(stage, places)
            else:
                assert log == model.one_f_one_b_texts(stage, p, places)


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_user_order_at_slack_zero(mode, seed):
    order = model.random_valid_order(seed, 3, 6)
    logs, _ = run(mode, 3, 6, delays=seed, hint=order, slack=0)
    for stage, log in enumerate(logs):
        assert log == [text for text in order if text[0] == str(stage)]


@MODES
@pytest.mark.parametrize("hint", ["bf", "fb", "b-priority", "f-priority", "auto"])
def test_rules_are_fixed_at_slack_zero(mode, hint):
    """Whatever the timing, slack 0 runs one order; another timing must not change it."""
    orders = [run(mode, 3, 7, delays=d, hint=hint, slack=0)[0] for d in (0, 1, 2)]
    assert orders[0] == orders[1] == orders[2]


@MODES
@pytest.mark.parametrize("slack", [1, 2, 5])
@pytest.mark.parametrize("hint", ["1f1b", "gpipe"])
def test_slack_bounds_overtaking(mode, hint, slack):
    """A forward runs at most `slack` positions beyond the first task that has not run."""
    p, m = 3, 9
    for delays in (1, 2, 3):
        logs, _ = run(mode, p, m, delays=delays, hint=hint, slack=slack, max_in_flight=64)
        for stage, log in enumerate(logs):
            order = (
                model.gpipe_texts(stage, range(m))
                if hint == "gpipe"
                else model.one_f_one_b_texts(stage, p, range(m))
            )
            left = list(order)
            for text in log:
                if "F" in text:
                    overtaken = order.index(text) - order.index(left[0])
                    assert overtaken <= slack, f"{text} ran while {left[0]} had not"
                left.remove(text)


@MODES
@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        (1, [1, 1, 1]),
        ([3, 1, 2], [3, 1, 2]),
        ("1f1b+2", [5, 4, 3]),
        (None, [3, 3, 3]),
        (50, [50, 50, 50]),
    ],
)
@pytest.mark.parametrize("hint", ["f-priority", "gpipe", "bf", "auto"])
def test_limit_is_kept_and_used(mode, hint, limit, allowed):
    logs, _ = run(mode, 3, 9, delays=4, hint=hint, max_in_flight=limit)
    peaks = [model.peak_units(log) for log in logs]
    assert all(peak <= k for peak, k in zip(peaks, allowed, strict=True)), (peaks, allowed)
    if hint in ("f-priority", "gpipe"):  # forwards come first: the first rank fills its limit
        assert peaks[0] == min(allowed[0], 9)


# One rank and one stage: nothing ever waits for a message, so a rule has one possible order.
ALONE = {
    ("gpipe", 3): "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    ("gpipe", 9): "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
    ("f-priority", 3): "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    ("f-priority", 1): "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ("b-priority", 9): "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ("bf", 9): "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ("fb", 9): "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ("1f1b", 9): "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
}


@pytest.mark.parametrize(("hint", "limit"), ALONE)
def test_rules_on_one_rank(hint, limit):
    logs, _ = run("threads", 1, 5, hint=hint, slack=None, max_in_flight=limit)
    assert logs == [["0" + text for text in ALONE[hint, limit].split()]]


def test_backward_forward_alternates():
    """BF is rounds, not backward priority: after a backward, a forward if one is ready.

    On the first rank a forward is always ready, and each backward gives a unit back.
    """
    for delays in (1, 2, 3):
        log = run("threads", 2, 12, delays=delays, hint="bf", slack=None, max_in_flight=6)[0][0]
        last_forward = max(i for i, text in enumerate(log) if text[1] == "F")
        pairs = zip(log[:last_forward], log[1 : last_forward + 1], strict=True)
        assert not [pair for pair in pairs if pair[0][1] == pair[1][1] == "B"], log


@MODES
@pytest.mark.parametrize("order", ["given", "mid", [4, 2, 0, 6, 1, 3, 5]])
def test_losses_in_the_callers_order(mode, order):
    inputs, targets, _ = model.make_batch(3, 0, 7, torch.float64)
    stages = [model.RecordingStage(7, s, torch.float64) for s in range(2)]
    expected = model.plain_loop(stages, inputs, targets, model.squared_error, [1.0] * 7)
    _, losses = run(mode, 2, 7, delays=8, microbatch_order=order, max_in_flight=7)
    assert losses == pytest.approx([x.item() for x in expected], rel=1e-12)
    assert len(set(losses)) == 7


@MODES
def test_readiness_overtakes_a_late_microbatch(mode):
    """The first forward of rank 1 waits for a slow one of rank 0: later work goes first."""
    logs = {}
    for slack in (0, None):
        group = worker_group(1, False) if mode == "threads" else worker_group(2)
        answers = group.values(run_late, mode, slack)
        logs[slack] = [log for part in answers for log in part]
    order = [f"1F{m}" for m in range(4)]
    assert [t for t in logs[0][1] if "F" in t] == order
    free = [t for t in logs[None][1] if "F" in t]
    assert sorted(free) == order
    assert free != order


def run_late(rank, num_ranks, mode, slack):
    """With slack None microbatch 0 is last in rank 0's order, and slow; in rank 1's it is first."""
    stages = [model.RecordingStage(7, s, torch.float64, {("F", 0): 0.2 * (s == 0)}) for s in (0, 1)]
    inputs, targets, _ = model.make_batch(3, 0, 4, torch.float64)
    first = [1, 2, 3, 0] if slack is None else [0, 1, 2, 3]
    order = [f"0F{m}" for m in first] + [f"0B{m}" for m in range(4)]
    order += model.gpipe_texts(1, range(4))
    own = stages if mode == "threads" else {rank: stages[rank]}
    rrfp.run_pipeline(
        own,
        inputs if mode == "threads" or rank == 0 else None,
        targets if mode == "threads" or rank == 1 else None,
        model.squared_error,
        hint=order,
        slack=slack,
        max_in_flight=4,
    )
    return [stage.log for stage in (stages if mode == "threads" else [stages[rank]])]
