"""Pipelines joined by agreement groups, one rank of which does not come or is wrong: who is named.

Would catch: a rank that is there and waits for another, blamed in its place; a refusal that members
know of and that their pipelines hear when the time is over.
"""

import time

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp


def open_linked(rank, num_ranks, absent, wrong, timeout_s):
    """(name of the error, its text, seconds) of a rank in pipelines (0, 1) and (2, 3), whose first
    ranks are members of one agreement group and whose last are of another; then all come."""
    pipelines = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    members = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]

    def build(agreement_group, timeout_s):
        return rrfp.Pipeline({rank % 2: nn.Linear(4, 4)}, group=pipelines[rank // 2],
                             agreement_group=agreement_group, set_up_timeout_s=timeout_s)

    torch.distributed.barrier()
    began, said = time.monotonic(), ("", "")
    if rank not in absent:
        try:
            build("nonne" if rank == wrong else members[rank % 2], timeout_s).close()
        except (rrfp.RrfpError, ValueError) as error:
            said = type(error).__name__, str(error)
    took_s = time.monotonic() - began
    torch.distributed.barrier()
    build(members[rank % 2], 60.0).close()
    return *said, took_s


@pytest.mark.parametrize("absent", [(3,), (0,), (2, 3)])
def test_the_rank_that_does_not_come_is_named(absent):
    answers = worker_group(4).values(open_linked, absent, None, 2.0)
    for rank, (name, text, _) in enumerate(answers):
        if rank not in absent:
            assert name == "RankTimeoutError", answers
            assert any(f"global rank {missing}" in text for missing in absent), answers


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_refusal_reaches_the_other_pipeline_at_once(wrong):
    answers = worker_group(4).values(open_linked, (), wrong, 60.0)
    assert {name for name, _, _ in answers} == {"ValueError"}, answers
    assert all("agreement_group is 'nonne'" in text for _, text, _ in answers), answers
    assert max(took_s for _, _, took_s in answers) < 30.0, answers


def part_and_retry(rank, num_ranks, parting):
    """What ranks of linked pipelines say to a step before which one sets up another module, and
    then, behind a barrier, to one that all make alike."""
    pipelines = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    members = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    batch = [torch.ones(2, 4)] * 2
    stage, said = nn.Linear(4, 4), []
    for step in range(3):
        torch.distributed.barrier()
        module = nn.Linear(4, 4) if (step, rank) == (1, parting) else stage
        try:
            rrfp.run_pipeline({rank % 2: module}, batch if rank % 2 == 0 else None,
                              batch if rank % 2 else None, nn.functional.mse_loss,
                              group=pipelines[rank // 2], agreement_group=members[rank % 2],
                              stall_timeout_s=12.0)
            said.append("ran")
        except (rrfp.RrfpError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("parting", [0, 1])
def test_a_parting_leaves_nothing_for_the_next_set_up(parting):
    """Its members were in a step, and have heard of it there."""
    for before, parted, after in worker_group(4).values(part_and_retry, parting):
        assert (before, after) == ("ran", "ran"), (before, parted, after)
        assert parted.startswith(("RanksParted: ", "ClosedError: ")), parted
