"""Ranks that set up again after troubles of every kind meet soon, whatever the interleaving.

Would catch: ranks that stay an attempt apart for ever, a card of a rank that has gone taken for a
live one's, an outcome that ranks see differently.
"""

import itertools
from unittest import mock

import pytest
from set_up_model import DIES, LATE, LEAVES, WELL, Explorer

from rrfp.rendezvous import Rendezvous

MOST_FAILURES = 2
PAIRS = list(itertools.combinations_with_replacement((WELL, LATE, LEAVES, DIES), 2))
QUICK = [pair for pair in PAIRS if WELL in pair or set(pair) == {LATE}]


def check(troubles, has_barrier):
    explorer = Explorer(troubles, has_barrier)
    assert explorer.most_failures(MOST_FAILURES + 1) <= MOST_FAILURES
    return explorer


def begin_next(rendezvous):
    """What ranks that pass over nothing do: each begins the set-up after its last."""
    number = rendezvous.store.add(rendezvous._counts[rendezvous.member.rank], 1)
    return f"{rendezvous._place}/{number}"


# Two late ranks behind a barrier are a first round in which nobody is.
@pytest.mark.parametrize(("troubles", "has_barrier"), [
    (pair, has_barrier) for pair in QUICK for has_barrier in (False, True)
    if not (has_barrier and set(pair) == {LATE})
])
def test_two_ranks_meet_within_two_failures(troubles, has_barrier):
    assert check(troubles, has_barrier).num_worlds > 200


@pytest.mark.parametrize("trouble", [LATE, DIES])
def test_ranks_that_pass_over_nothing_stay_apart(trouble):
    explorer = Explorer((WELL, trouble), has_barrier=True)
    with mock.patch.object(Rendezvous, "_begin", begin_next):
        assert explorer.most_failures(10) == 10


@pytest.mark.slow
@pytest.mark.parametrize("has_barrier", [False, True])
@pytest.mark.parametrize("troubles", [pair for pair in PAIRS if pair not in QUICK])
def test_two_ranks_in_trouble_meet(troubles, has_barrier):
    check(troubles, has_barrier)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", [LATE, LEAVES, DIES])
def test_three_ranks_meet(trouble):
    check((WELL, WELL, trouble), has_barrier=True)
