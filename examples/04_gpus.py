"""A GPU for each process; on a machine without GPUs the same on its cores.

    torchrun --nproc-per-node 2 examples/04_gpus.py
"""

import os

import torch
from torch import nn

import rrfp

device = torch.device("cpu")
if torch.cuda.is_available():  # of this host's GPUs the one with the number of this process
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
torch.distributed.init_process_group("gloo")  # to meet; rrfp carries GPU tensors itself
rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
print(f"rank {rank} trains on {device}")

torch.manual_seed(rank)
stage = nn.Linear(32 if rank == 0 else 64, 8 if rank == last else 64)
stage = (stage if rank == last else nn.Sequential(stage, nn.ReLU())).to(device)
optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
draw = torch.Generator().manual_seed(0)

for step in range(40):
    inputs = torch.randn(256, 32, generator=draw)  # which of the first 8 is the largest?
    targets = inputs[:, :8].argmax(dim=1)
    optimizer.zero_grad()
    result = rrfp.run_pipeline(
        stage, inputs.to(device).chunk(8) if rank == 0 else None,
        targets.to(device).chunk(8) if rank == last else None, nn.functional.cross_entropy)
    optimizer.step()
    if rank == last:
        print(f"step {step}: loss {sum(result.losses).item() / len(result.losses):.3f}")
torch.distributed.destroy_process_group()
