"""rrfp.simulate: its examples, its table, and steps that can be worked out by hand."""

import doctest
from pathlib import Path

import pytest

import rrfp
import rrfp.simulation

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


def test_the_table_of_a_step_without_a_limit():
    step = rrfp.simulate(lambda kind, stage, m: 1.0, num_stages=2, num_microbatches=2,
                         forward_only=True)
    assert "of none" in str(step)
