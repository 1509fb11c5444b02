"""The committed policy table agrees with a second simulator, and the docs say what it says."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def comparison():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import second_simulator
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return second_simulator.comparison()


def test_the_docs_hold_the_tables_as_printed(comparison):
    docs = (ROOT / "docs/simulation.md").read_text()
    begin, end = "<!-- second_simulator.py -->\n", "\n<!-- end -->"
    assert docs.count(begin) == docs.count(end) == 1
    assert docs.split(begin)[1].split(end)[0] == comparison.text


def test_only_what_the_docs_explain_is_apart(comparison):
    """Slack 2 lets W overtake more here: docs/simulation.md."""
    assert set(comparison.apart) == {(8, "ZB-H1 slack 2", limit, "constant")
                                     for limit in (1.0, 1.25)}
    assert comparison.num_cells > 100


def test_auto_with_mid_is_worth_what_it_must_be(comparison):
    for limit, wanted in ((1.0, 1.26), (2.0, 1.39)):
        assert comparison.table.speed_up(8, "auto split", limit, "mid") >= wanted
