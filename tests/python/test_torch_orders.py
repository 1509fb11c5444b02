"""The named orders are those of torch's pipelining schedules of the same name, task for task.

The last rank of 1f1b is left out: torch 2.13 lists its forwards there one too high.
"""

import pytest
import torch
from torch.distributed.pipelining import schedules

from rrfp import _C


class Stage:
    """As much of a torch pipeline stage as a schedule looks at to write its order."""

    submod = torch.nn.Linear(1, 1)
    has_backward, group, device = True, None, torch.device("cpu")

    def __init__(self, index, num_ranks, placement):
        self.stage_index, self.num_stages = index, len(placement)
        self.group_size, self.group_rank = num_ranks, placement[index]
        self.is_first, self.is_last = index == 0, index == len(placement) - 1
        self.stage_index_to_group_rank = dict(enumerate(placement))


def loop(num_ranks, num_chunks):
    return [stage % num_ranks for stage in range(num_ranks * num_chunks)]


def v_shape(num_ranks):
    return [*range(num_ranks), *reversed(range(num_ranks))]


NAMES = {  # hint: (torch's schedule, placement, split backward)
    "gpipe": (schedules.ScheduleGPipe, lambda p: loop(p, 1), False),
    "1f1b": (schedules.Schedule1F1B, lambda p: loop(p, 1), False),
    "interleaved": (schedules.ScheduleInterleaved1F1B, lambda p: loop(p, 2), False),
    "zb-h1": (schedules.ScheduleInterleavedZeroBubble, lambda p: loop(p, 1), True),
    "zbv": (schedules.ScheduleZBVZeroBubble, v_shape, True),
}


def torch_order(schedule, num_ranks, num_microbatches, placement):
    own = [Stage(i, num_ranks, placement) for i, rank in enumerate(placement) if rank == 0]
    is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
    made = schedule(own[0] if is_single else own, num_microbatches)
    order = made._get_pipeline_order() if is_single else made.pipeline_order
    return {
        rank: [str(task) for task in tasks if task is not None and "REDUCE" not in str(task)]
        for rank, tasks in order.items()
    }


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_order_is_torchs(name, num_ranks):
    schedule, place, is_split = NAMES[name]
    placement = place(num_ranks)
    edges = [(stage, stage + 1) for stage in range(len(placement) - 1)]
    graph = _C.StageGraph(num_ranks, placement, edges, [len(placement) - 1])
    for num_microbatches in (num_ranks, 2 * num_ranks, 4 * num_ranks):
        plan = _C.StepPlan(
            graph, num_microbatches, [], name, [], 0, [], False, split_backward=is_split
        )
        expected = torch_order(schedule, num_ranks, num_microbatches, placement)
        for rank in range(num_ranks - (name == "1f1b")):
            assert plan.order(rank) == expected[rank], f"rank {rank} of {num_microbatches}"
