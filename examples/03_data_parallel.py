"""Data parallel times pipeline: two pipelines of two ranks, each with batches of its own.

    torchrun --nproc-per-node 4 examples/03_data_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rrfp


def average_gradients(stage, replicas):
    """After the step: outside the tasks, which each pipeline runs in an order of its own."""
    for parameter in stage.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad /= replicas.size()


def batch_of(step, pipeline):
    generator = torch.Generator().manual_seed(2 * step + pipeline)
    inputs = torch.randn(96, 16, generator=generator, dtype=torch.get_default_dtype())
    return inputs, inputs[:, :4].argmax(dim=1)


def make_stage(rank):
    torch.manual_seed(rank)  # the replicas of a stage begin alike
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh()) if rank == 0 else nn.Linear(64, 4)


def train(mesh, num_steps=40, **options):
    """This rank's stage, after some steps; the last rank of each pipeline prints its losses."""
    rank, pipeline = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stage = make_stage(rank)
    optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
    for step in range(num_steps):
        inputs, targets = batch_of(step, pipeline)
        optimizer.zero_grad()
        result = rrfp.run_pipeline(
            {rank: stage}, inputs.chunk(6) if rank == 0 else None,
            targets.chunk(6) if rank == 1 else None, nn.functional.cross_entropy,
            group=mesh, **options)
        average_gradients(stage, mesh["dp"].get_group())
        rrfp.clip_grad_norm_(stage.parameters(), 1.0, group=mesh["pp"].get_group())
        optimizer.step()
        if rank == 1 and step % 10 == 9:
            print(f"pipeline {pipeline}, step {step}: loss {sum(result.losses) / 6:.3f}")
    return stage


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    dist.destroy_process_group()
