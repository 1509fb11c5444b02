"""The default options in linked pipelines, over more steps than the guard of hint "auto" looks at.

Would catch: pipelines that choose each by its own times, which the members of a group then refuse.
"""

import torch
from parity_group import worker_group
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rrfp

NUM_STEPS, WIDTH = 150, 4


def step_often(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage, batch = mesh["pp"].get_local_rank(), [torch.ones(2, WIDTH)] * 4
    pipeline = rrfp.Pipeline({stage: nn.Linear(WIDTH, WIDTH)}, group=mesh, agreement_group="auto",
                             set_up_timeout_s=60.0)
    hints = set()
    for _ in range(NUM_STEPS):
        result = pipeline.step(batch if stage == 0 else None, batch if stage else None,
                               nn.functional.mse_loss, stall_timeout_s=60.0)
        hints.add(result.report.hint)
    dist.barrier()
    pipeline.close()
    return hints


def test_linked_pipelines_keep_to_what_all_were_given():
    for hints in worker_group(4).values(step_often):
        assert hints == {"auto"}, hints
