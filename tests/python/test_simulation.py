"""rrfp.simulate: its examples, its table, and steps that can be worked out by hand."""

import doctest
import random
from pathlib import Path

import pytest

import rrfp
import rrfp.simulation
from rrfp import _C
from rrfp.layout import make_layout

PAGE = Path(__file__).resolve().parents[2] / "docs/concepts.md"


def test_the_examples_of_the_docstrings():
    done = doctest.testmod(rrfp.simulation)
    assert done.attempted >= 4 and not done.failed


def test_the_example_of_the_page():
    block = next(b for b in PAGE.read_text().split("```") if b.startswith("text\n>>> print(rrfp"))
    example = doctest.DocTestParser().get_doctest(
        block.removeprefix("text\n"), {"rrfp": rrfp}, "concepts.md", None, 0)
    assert not doctest.DocTestRunner().run(example).failed


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (4, 8), (6, 6)])
def test_split_steps_take_the_textbook_time(ranks, microbatches):
    step = rrfp.simulate(lambda kind, stage, m: 1.0, num_stages=ranks,
                         num_microbatches=microbatches, hint="zb-h1", slack=0,
                         split_backward=True)
    assert step.makespan_s == 3 * microbatches + ranks - 1
    assert all(step.busy_s(rank) == 3 * microbatches for rank in range(ranks))
    assert f"makespan {3 * microbatches + ranks - 1} s, 0 overtakes" in str(step)


def test_the_table_of_a_step_that_counts_no_units():
    options = {"num_stages": 2, "num_microbatches": 3, "hint": "gpipe"}
    for limit, units in ((3, "3 of 3"), ("1kB", "3")):
        step = rrfp.simulate(lambda kind, stage, m: 1.0, max_in_flight=limit,
                             activation_bytes=300, **options)
        assert [line.split("  ")[-1].strip() for line in str(step).splitlines()[1:3]] == [units] * 2
    step = rrfp.simulate(lambda kind, stage, m: 1.0, forward_only=True, **options)
    assert " of " not in str(step)


@pytest.mark.parametrize(("limit", "sizes", "named"), [
    ("1GiB", None, "stages 0, 1"), ([2, "1GiB"], None, "stage 1"), (["1GiB", 2], {1: 5}, "stage 0"),
])
def test_a_limit_in_bytes_needs_sizes(limit, sizes, named):
    """Would catch: a limit in bytes that simulates the default limit and says nothing."""
    options = {"num_stages": 2, "num_microbatches": 3, "max_in_flight": limit}
    with pytest.raises(ValueError, match=f"the size of {named} is not known.*activation_bytes"):
        rrfp.simulate(lambda kind, stage, m: 1.0, activation_bytes=sizes, **options)
    given = {**(sizes or {}), 0: "1MB", 1: [7, 8, 9]}
    assert rrfp.simulate(lambda kind, stage, m: 1.0, activation_bytes=given, **options).makespan_s
    rrfp.simulate(lambda kind, stage, m: 1.0, forward_only=True, **options)


def test_what_a_step_has_learnt_changes_the_next():
    plan = _C.StepPlan(make_layout(4, None, "loop").graph, 12, [], "auto", [], _C.AUTO_SLACK,
                       [4] * 4, False, split_backward=True)
    rng = random.Random(5)
    durations = [round(1e6 * rng.lognormvariate(0, 0.5)) for _ in range(3 * 4 * 12)]
    latencies = [50_000] * len(durations)
    times = _C.LearntTimes(4, 1)
    first, second = (_C.simulate(plan, durations, latencies, False, times) for _ in range(2))
    assert first.ranks == _C.simulate(plan, durations, latencies, False).ranks
    assert first.ranks != second.ranks
    with pytest.raises(ValueError, match="one entry per rank"):
        _C.simulate(plan, durations, latencies, False, _C.LearntTimes(3, 1))


@pytest.mark.parametrize("value", [None, "1", -1.0, float("nan"), [1.0]])
def test_what_is_no_duration_is_refused_by_name(value):
    with pytest.raises(ValueError, match="durations of 0F0 is .*; it must be a number of seconds"):
        rrfp.simulate(lambda kind, stage, m: value, num_stages=2, num_microbatches=2)
