"""Many steps of tiny tasks: nothing that a process holds may grow.

Would catch: a descriptor, thread, mapping or message that stays behind after each step.
"""

import json
from pathlib import Path

import pytest
from soak import NUM_SAMPLES, ROOT, soak

LONG = (4, 20_000)


def check(samples):
    for rank, taken in enumerate(samples):
        assert len(taken) == NUM_SAMPLES, (rank, taken)
        early, late = taken[2], taken[-1]
        for name in ("descriptors", "threads", "segments"):
            assert late[name] <= early[name], (rank, name, taken)
        # The allocator's own growth; 150 bytes a step would show in the long form.
        assert late["kib"] - early["kib"] < 2048, (rank, taken)


@pytest.mark.time_limit(3600)
@pytest.mark.parametrize(
    ("count", "steps"), [(2, 300), pytest.param(*LONG, marks=pytest.mark.slow)]
)
def test_nothing_grows(count, steps, seed):
    check(soak(count, steps, seed, timeout_s=3500))


def test_recorded_soak():
    """The figures that are shown are those of a soak in which nothing grew."""
    text = Path(ROOT, "benchmarks/results/soak.json").read_text()
    results = json.loads(text)["results"]
    assert (results["num_ranks"], results["steps"]) == LONG
    check(results["samples"])
