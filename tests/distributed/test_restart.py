"""A failed step costs nothing but itself: training goes on, in the same processes or in new ones
from a checkpoint, with the losses of a run that was never disturbed, bit for bit.

Would catch: a parameter or an optimizer that a failed step has touched, a step counted twice or
not at all, random numbers that depend on what ran before.
"""

import functools

import pytest
from launch import run_job

STEPS = 5
FAILS_AT = 3


def run(num_ranks, folder, **more):
    plan = {"mode": "restart", "num_ranks": num_ranks, "folder": str(folder), "steps": STEPS,
            "fault": "none", "step": FAILS_AT, "microbatch": 2, **more}
    ends, orphans, transcript = run_job(plan)
    assert not orphans
    return ends, transcript


def losses_of(ends):
    """{steps run: losses}, the same on every rank."""
    said = [{e["step"]: e["losses"] for e in end.events if e["event"] == "trained"}
            for end in ends]
    assert all(losses == said[0] for losses in said)
    return said[0]


@functools.cache
def undisturbed(num_ranks, folder):
    ends, transcript = run(num_ranks, folder)
    assert all(end.event("done") and end.exit_code == 0 for end in ends), transcript
    losses = losses_of(ends)
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.mark.parametrize(
    ("fault", "again", "num_ranks"),
    [
        ("kill-F", False, 3),
        ("raise-F", True, 3),
        *(
            pytest.param(fault, again, num_ranks, marks=pytest.mark.slow)
            for fault, again in (("kill-F", False), ("raise-B", False), ("raise-F", True))
            for num_ranks in (2, 4)
        ),
    ],
)
def test_losses_go_on_bit_for_bit(fault, again, num_ranks, tmp_path, tmp_path_factory):
    whole = tmp_path_factory.getbasetemp() / f"undisturbed-{num_ranks}"
    whole.mkdir(exist_ok=True)
    expected = undisturbed(num_ranks, whole)
    ends, transcript = run(num_ranks, tmp_path, fault=fault, rank=1, again=again)
    survivors = [end for end in ends if end.exit_code >= 0]
    assert all(end.error for end in survivors), transcript
    if not again:
        assert losses_of(survivors) == {s: expected[s] for s in range(1, FAILS_AT + 1)}
        ends, transcript = run(num_ranks, tmp_path)
        assert all(end.event("done") for end in ends), transcript
        assert losses_of(ends) == {s: expected[s] for s in range(FAILS_AT + 1, STEPS + 1)}
    else:
        assert all(end.event("done") for end in ends), transcript
        assert losses_of(ends) == expected
