"""Steps of tensor-parallel ranks whose tasks meet in real all-reduces while one is always late."""

import os
import random
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rrfp

NUM_MEMBERS = 2
HINTS = {
    1: ["auto", "bf", "1f1b", "fb", "b-priority", "f-priority", "bfw"],
    2: ["auto", "bf", "interleaved", "fb", "b-priority", "f-priority", "bfw"],
}
LIMITS = {1: [None, 2, 3, "1f1b+2"], 2: [None, 4, 7]}
_meshes = {}


def mesh_of(num_ranks):
    """Two members; as many pipeline ranks as the processes make."""
    if num_ranks not in _meshes:
        _meshes[num_ranks] = init_device_mesh(
            "cpu", (num_ranks // NUM_MEMBERS, NUM_MEMBERS), mesh_dim_names=("pp", "tp")
        )
    return _meshes[num_ranks]


class Skewed(torch.nn.Module):
    """A stage with an all-reduce inside F and B, and seeded delays of this member's own."""

    def __init__(self, group, seed, late_s):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.group, self.random, self.late_s = group, random.Random(seed), late_s

    def forward(self, value):
        time.sleep(self.random.random() * self.late_s)
        return Meet.apply(value * self.weight, self)


class Meet(torch.autograd.Function):
    """Sums over the group both ways; the members must be in the same task."""

    @staticmethod
    def forward(context, value, stage):
        context.stage = stage
        total = value.clone()
        dist.all_reduce(total, group=stage.group)
        return total / NUM_MEMBERS

    @staticmethod
    def backward(context, gradient):
        stage = context.stage
        time.sleep(stage.random.random() * stage.late_s)
        total = gradient.clone()
        dist.all_reduce(total, group=stage.group)
        return total / NUM_MEMBERS, None


def run_skewed(rank, num_ranks, seed, num_steps, late_s, num_chunks=1):
    """The order of each step, with member 1 late always; microbatches have values of their own."""
    mesh = mesh_of(num_ranks)
    member, num_stages = mesh["tp"].get_local_rank(), num_chunks * mesh["pp"].size()
    own = range(mesh["pp"].get_local_rank(), num_stages, mesh["pp"].size())
    modules = {
        stage: Skewed(mesh["tp"].get_group(), seed * 100 + 10 * stage + member,
                      late_s * (1 + 2 * member))
        for stage in own
    }
    has_last = num_stages - 1 in modules
    draws = random.Random(seed)
    orders = []
    with rrfp.Pipeline(modules, group=mesh, agreement_group="auto") as pipeline:
        for _ in range(num_steps):
            num_microbatches = draws.randint(1, 6)
            hint, limit = draws.choice(HINTS[num_chunks]), draws.choice(LIMITS[num_chunks])
            values = [torch.tensor([float(m + 1)]) for m in range(num_microbatches)]
            for module in modules.values():
                module.weight.grad = None
            result = pipeline.step(
                values if 0 in modules else None,
                [None] * num_microbatches if has_last else None,
                (lambda out, _: out.sum()) if has_last else None,
                hint=hint, max_in_flight=limit,
            )
            # Every all-reduce mixed values of one microbatch, or the mean is off.
            want = sum(range(1, num_microbatches + 1)) / num_microbatches
            for stage, module in modules.items():
                assert abs(module.weight.grad.item() - want) < 1e-5, (stage, module.weight.grad)
            orders.append(result.report.ranks[0].order)
    return orders


def run_stopped(rank, num_ranks, stopped, num_steps, num_chunks=1):
    """As run_skewed; one rank is stopped for a second in the midst of it."""
    if rank == stopped:
        waker = (
            "import os, signal, sys, time; pid = int(sys.argv[1]); time.sleep(0.2); "
            "os.kill(pid, signal.SIGSTOP); time.sleep(1.0); os.kill(pid, signal.SIGCONT)"
        )
        child = subprocess.Popen([sys.executable, "-S", "-c", waker, str(os.getpid())])
    orders = run_skewed(rank, num_ranks, 7, num_steps, 0.002, num_chunks)
    if rank == stopped:
        assert child.wait(30) == 0
    return orders
