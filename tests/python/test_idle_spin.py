"""How long an idle worker spins, by the cores of this process and the ranks of this host."""

import os

import pytest

from rrfp import _C, idle_spin
from rrfp.settings import Settings


@pytest.mark.parametrize(
    "cores, ranks, expected",
    [(2, 1, (50, True)), (2, 2, (50, True)), (3, 1, (5000, False)), (11, 4, (50, True)),
     (12, 4, (5000, False))],
)
def test_a_spare_core_may_spin(monkeypatch, cores, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert idle_spin.idle_spin(ranks) == expected


def test_the_variable_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(idle_spin, "SETTINGS", Settings(spin_us=7))
    assert idle_spin.idle_spin(64) == (7, False)


def test_ranks_of_this_host_are_counted_by_its_address():
    own = _C.SocketListener("127.0.0.1").address
    assert idle_spin.count_ranks_here(own, [own, _C.SocketListener("127.0.0.1").address]) == 2
    elsewhere = ["unix:a,tcp:10.0.0.2:5", "tcp:[fe80::1%eth0]:5", "tcp:127.0.0.11:5"]
    assert idle_spin.count_ranks_here(own, [own, *elsewhere]) == 1
    unix = _C.SocketListener().address
    assert idle_spin.count_ranks_here(unix, [unix, _C.SocketListener().address]) == 2
