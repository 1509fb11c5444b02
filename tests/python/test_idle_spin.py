"""How long an idle worker spins, by the cores of this process and the ranks of this host."""

import os

import pytest
import torch

from rrfp import _C, idle_spin
from rrfp.settings import Settings


@pytest.mark.parametrize(
    "cores, ranks, torch_threads, expected",
    [(2, 1, 1, (50, True)), (2, 2, 1, (50, True)), (3, 1, 1, (5000, False)),
     (11, 4, 1, (50, True)), (12, 4, 3, (5000, False)), (12, 4, 4, (50, True)),
     (16, 4, 4, (5000, False)), (16, 1, 16, (5000, False)), (16, 2, 16, (50, True))],
)
def test_a_spare_core_may_spin(monkeypatch, cores, ranks, torch_threads, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
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
