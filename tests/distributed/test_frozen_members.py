"""Ranks that freeze where only time tells: in a collective of the stage's own, or with the store.

Would catch: a rank that neither raises nor says anything while it waits for one that is gone.
"""

import datetime
import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rrfp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from parity_group import WorkerGroup  # noqa: E402

NUM_RANKS = 4
# Longer than a rank is silent, and its end is told, before the collective gives up.
COLLECTIVE_TIMEOUT_S = 20.0


def freeze_in_a_stage(rank, num_ranks, where, log_path):
    """Rank 1 stops in a stage while rank 0 waits for it in the all-reduce of that stage."""
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in ([0, 1], [2, 3])]
    pipelines = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    logging.getLogger("rrfp").addHandler(logging.FileHandler(f"{log_path}{rank}"))
    stage, member = rank // 2, rank % 2

    def freeze(point):
        if rank == 1 and point == where:
            os.kill(os.getpid(), signal.SIGSTOP)

    def mean(value, point):
        freeze(point)
        total = value.clone()
        dist.all_reduce(total, group=groups[stage])
        return total / 2

    class Meet(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return mean(value, "F")

        @staticmethod
        def backward(context, gradient):
            return mean(gradient, "B")

    class Meeting(torch.nn.Linear):
        def forward(self, value):
            return Meet.apply(super().forward(value))

    inputs = [torch.ones(1, 1)] * 4
    try:
        rrfp.run_pipeline(
            {stage: Meeting(1, 1)}, inputs if stage == 0 else None, inputs if stage == 1 else None,
            torch.nn.functional.mse_loss if stage == 1 else None, group=pipelines[member],
            agreement_group=groups[stage],
        )
    except rrfp.RrfpError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("where", ["F", pytest.param("B", marks=pytest.mark.slow)])
def test_a_member_frozen_in_a_collective_of_the_stage_is_told_on_every_rank(
    where, tmp_path, monkeypatch
):
    monkeypatch.setenv("RRFP_PEER_TIMEOUT_S", "4")
    group = WorkerGroup(NUM_RANKS)
    group.start()
    try:
        for connection in group.connections:
            connection.send((freeze_in_a_stage, (where, str(tmp_path / "log"))))
        for rank in (2, 3, 0):  # the last is in the collective until its time is over
            assert group.connections[rank].poll(90), f"rank {rank} said nothing"
            answer = group.connections[rank].recv().value
            assert answer is not None and answer[0] == "PeerLostError", (rank, answer)
        logged = (tmp_path / "log0").read_text()
        assert f"rank 0 is inside 0{where}" in logged and "PeerLostError" in logged, logged
        assert "all_reduce" in logged, logged
        others = [(tmp_path / f"log{rank}").read_text() for rank in (2, 3)]
        assert others == ["", ""], others
    finally:
        group.kill()


def freeze_the_store(rank, num_ranks):
    """Rank 0, whose process holds the store, stops before it sets up."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        rrfp.Pipeline(torch.nn.Linear(1, 1), set_up_timeout_s=3.0)
    except rrfp.RrfpError as error:
        return type(error).__name__, str(error), time.monotonic() - began_s
    return None


def test_a_frozen_store_ends_a_set_up_in_time():
    group = WorkerGroup(2)
    group.start()
    try:
        for connection in group.connections:
            connection.send((freeze_the_store, ()))
        assert group.connections[1].poll(60), "rank 1 said nothing"
        answer = group.connections[1].recv()
        name, text, seconds = answer.value
        assert name == "PeerLostError" and "no answer from the store" in text, answer
        assert seconds < 30.0, answer
    finally:
        group.kill()
