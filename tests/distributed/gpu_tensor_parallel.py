"""One rank of tensor-parallel pipelines on GPUs: all-reduces of NCCL inside every task.

    torchrun --nproc-per-node 2 tests/distributed/gpu_tensor_parallel.py --stages-per-rank 2

Two ranks hold halves of each stage, one on each GPU, and form an agreement group. With two
processes each is a pipeline of its own; with four there are two pipelines of two ranks, and each
GPU has a rank of both stages. Gradients are compared with the whole model's. Prints one JSON line
per rank; any failure ends the process with an exception.
"""

import argparse
import json
import os
import random

import torch
import torch.distributed as dist
from torch import nn

import rrfp

WIDTH, HIDDEN, MICROBATCHES, SPLIT = 64, 128, 8, 2
HINTS = ("auto", "bf", "bfw", "interleaved")


class Half(nn.Module):
    """One rank's half of ``Whole``: columns of ``up``, rows of ``down``."""

    def __init__(self, whole, group, seed):
        super().__init__()
        part = dist.get_rank(group)
        self.up = nn.Parameter(whole.up.detach().chunk(SPLIT, 0)[part].clone())
        self.down = nn.Parameter(whole.down.detach().chunk(SPLIT, 1)[part].clone())
        self.group, self.random = group, random.Random(seed)

    def forward(self, value):
        torch.cuda._sleep(self.random.randrange(400_000))
        inner = torch.tanh(SumBack.apply(value, self.group) @ self.up.T)
        return value + SumOut.apply(inner @ self.down.T, self.group)


class Whole(nn.Module):
    def __init__(self, seed, device):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (("up", (HIDDEN, WIDTH)), ("down", (WIDTH, HIDDEN))):
            values = torch.randn(shape, generator=generator) * 0.1
            self.register_parameter(name, nn.Parameter(values.to(device)))

    def forward(self, value):
        return value + torch.tanh(value @ self.up.T) @ self.down.T


class SumBack(torch.autograd.Function):
    @staticmethod
    def forward(context, value, group):
        context.group = group
        return value.view_as(value)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(context, value, group):
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(context, gradient):
        return gradient, None


def loss_fn(output, target):
    return (output - target).square().mean()


def make_groups(rank, num_ranks):
    """This rank's (pipeline, members that share its stages); every rank makes all groups."""
    num_pipeline_ranks = num_ranks // SPLIT
    pipelines = [dist.new_group(list(range(m, num_ranks, SPLIT))) for m in range(SPLIT)]
    members = [
        dist.new_group([SPLIT * r, SPLIT * r + 1], backend="nccl")
        for r in range(num_pipeline_ranks)
    ]
    return pipelines[rank % SPLIT], members[rank // SPLIT]


def run_step(options, step, wholes, mine, pipeline, members):
    device = wholes[0].up.device
    generator = torch.Generator().manual_seed(options.seed * 101 + step)
    inputs, targets = (
        [torch.randn(3 + m, WIDTH, generator=generator).to(device) for m in range(MICROBATCHES)]
        for _ in range(2)
    )
    for module in (*wholes, *mine.values()):
        module.zero_grad()
    is_chunked = options.stages_per_rank > 1
    rrfp.run_pipeline(
        mine, inputs if 0 in mine else None, targets if len(wholes) - 1 in mine else None,
        loss_fn, group=pipeline, agreement_group=members, transport=options.transport,
        hint=HINTS[step % (4 if is_chunked else 3)], deterministic=step % 5 == 4,
        stall_timeout_s=60,
    )
    for value, target in zip(inputs, targets, strict=True):
        for whole in wholes:
            value = whole(value)
        (loss_fn(value, target) / MICROBATCHES).backward()
    part = dist.get_rank(members)
    for index, half in mine.items():
        torch.testing.assert_close(half.up.grad, wholes[index].up.grad.chunk(SPLIT, 0)[part],
                                   rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(half.down.grad, wholes[index].down.grad.chunk(SPLIT, 1)[part],
                                   rtol=1e-4, atol=1e-6)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank % SPLIT)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    pipeline, members = make_groups(rank, num_ranks)
    num_pipeline_ranks = num_ranks // SPLIT
    own = rank // SPLIT
    wholes = [
        Whole(options.seed * 17 + stage, device)
        for stage in range(options.stages_per_rank * num_pipeline_ranks)
    ]
    mine = {
        stage: Half(whole, members, options.seed + 31 * rank + stage)
        for stage, whole in enumerate(wholes)
        if stage % num_pipeline_ranks == own
    }
    for step in range(options.steps):
        run_step(options, step, wholes, mine, pipeline, members)
    print(json.dumps({"rank": rank, "steps": options.steps, "done": True}), flush=True)
    dist.barrier(group=dist.new_group(backend="gloo"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
