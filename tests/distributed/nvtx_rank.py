"""One rank of two, for test_nvtx.py: two steps of a pipeline of processes on the CPU.

    python tests/distributed/nvtx_rank.py RANK FOLDER
"""

import sys

import torch
import torch.distributed as dist

import rrfp

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
stage = torch.nn.Linear(8, 8)
batch = [torch.ones(2, 8) for _ in range(3)]
for _ in range(2):
    rrfp.run_pipeline(
        stage, batch if rank == 0 else None, batch if rank == 1 else None,
        torch.nn.functional.mse_loss, split_backward=False,
    )
dist.destroy_process_group()
