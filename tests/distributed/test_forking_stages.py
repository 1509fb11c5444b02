"""Stages and hints that fork, in pipelines that share agreement groups.

Would catch: a child that ends the run of its parent's group, or decides for it, in the memory that
the members share; and one that goes on in its parent's script.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

import rrfp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from parity_group import worker_group  # noqa: E402
from skewed_members import mesh_of  # noqa: E402

NUM_RANKS = 4


class Forking(torch.nn.Linear):
    """Forks in its first forward, and leaves it in the child as it is told."""

    def __init__(self, leave):
        super().__init__(1, 1)
        self.leave, self.status = leave, None

    def forward(self, x):
        child = os.fork() if self.status is None else None
        if child == 0:
            self.status = 0
            return self.leave(x)
        if child is not None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return super().forward(x)


def run_forking(rank, num_ranks, leave):
    mesh = mesh_of(num_ranks)
    stage = mesh["pp"].get_local_rank()
    module = Forking(LEAVES[leave][0]) if rank == 0 else torch.nn.Linear(1, 1)
    inputs = [torch.ones(1, 1)] * 4
    with rrfp.Pipeline({stage: module}, group=mesh, agreement_group="auto") as pipeline:
        for _ in range(2):
            pipeline.step(inputs if stage == 0 else None, inputs if stage == 1 else None,
                          torch.nn.functional.mse_loss, stall_timeout_s=60.0)
    return getattr(module, "status", None)


def fail(x):
    raise ValueError("in the child")


LEAVES = {"returns": (lambda x: x, 0), "raises": (fail, 1), "exits": (lambda x: sys.exit(3), 3)}


@pytest.mark.parametrize("leave", LEAVES)
def test_a_child_of_a_stage_says_nothing_to_the_members(leave):
    statuses = worker_group(NUM_RANKS).values(run_forking, leave)
    assert statuses == [LEAVES[leave][1], None, None, None]


def run_forking_hint(rank, num_ranks):
    """The exit status of a child that leaves a callable hint, and with it the whole script."""
    mesh = mesh_of(num_ranks)
    stage, statuses, inputs = mesh["pp"].get_local_rank(), [], [torch.ones(1, 1)] * 4

    def hint(task, state):
        if rank == 0 and not statuses:
            child = os.fork()
            if child == 0:
                sys.exit(3)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return task.microbatch

    with rrfp.Pipeline({stage: torch.nn.Linear(1, 1)}, group=mesh,
                       agreement_group="auto") as pipeline:
        for _ in range(2):
            try:
                pipeline.step(inputs if stage == 0 else None, inputs if stage == 1 else None,
                              torch.nn.functional.mse_loss, hint=hint, stall_timeout_s=60.0)
            except SystemExit as error:
                os._exit(error.code)
    return statuses


def test_a_child_of_a_hint_says_nothing_to_the_members():
    assert worker_group(NUM_RANKS).values(run_forking_hint) == [[3], [], [], []]
