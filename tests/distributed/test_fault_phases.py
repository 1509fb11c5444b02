"""Fault by phase: whatever happens in whichever phase of training, every rank says so in time.

The default suite runs a few cells of the matrix, another choice for each seed; -m slow all of
them. Would catch: a phase in which a rank waits for one that is gone, blames another, or has
other parameters than before; a table in docs/errors.md that is no longer true.
"""

import random
import re

import pytest
from fault_matrix import BEGIN, BOUND_S, END, FAULTS, PAGE, cells, expected_rows, row, run

NUM_DRAWN = 8


def drawn(seed):
    """Some cells, each of another fault."""
    draw = random.Random(seed)
    chosen = draw.sample([f for f in FAULTS if f.own not in ("frozen", "absent")], NUM_DRAWN)
    return [draw.choice([cell for cell in cells() if cell.fault is fault]) for fault in chosen]


def check(some):
    for cell, told in run(some):
        print(row(cell, told), end="")


def test_some_faults(seed):
    check(drawn(seed))


@pytest.mark.slow
@pytest.mark.time_limit(1800)
def test_every_fault_in_every_phase():
    check(cells())


def test_page_has_the_table():
    """Every cell is there, with what is expected of it, and heard of in time."""
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()[2:]
    seconds = re.compile(r"[\d.]+ \|$")
    shown = [seconds.sub(" |", line) for line in table]
    assert shown == [line.rstrip("\n") for line in expected_rows()]
    for line in table:
        (took,) = re.findall(r"([\d.]+) \|$", line) or ["0"]
        assert float(took) < BOUND_S, line
