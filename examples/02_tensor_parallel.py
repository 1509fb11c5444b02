"""TP2 x PP2: two pipelines of two stages, whose ranks meet in all-reduces inside every task.

    torchrun --nproc-per-node 4 examples/02_tensor_parallel.py [--sequence-parallel | --dtensor]

The ranks that share a stage (the mesh's "tp" dimension) form an agreement group: they run the
same tasks in the same order, whatever order their messages come in, so that their collectives
match. Each prints its losses; a plain model on one rank checks the gradients.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rrfp

WIDTH, HIDDEN, TOKENS, MICROBATCHES = 8, 16, 4, 6


class CopyIn(torch.autograd.Function):
    """The same on all ranks going in; gradients are summed coming back."""

    @staticmethod
    def forward(context, value, group):
        context.group = group
        return value.view_as(value)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class SumOut(torch.autograd.Function):
    """Partial results are summed going out; gradients pass coming back."""

    @staticmethod
    def forward(context, value, group):
        total = value.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None


def _gather(value, group):
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts)


def _own_rows(value, group):
    return value.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


class GatherRows(torch.autograd.Function):
    """Sequence parallel, going in: all rows of what the ranks hold a share of each."""

    @staticmethod
    def forward(context, value, group):
        context.group = group
        return _gather(value, group)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=context.group)
        return _own_rows(gradient, context.group), None


class ScatterRows(torch.autograd.Function):
    """Sequence parallel, going out: the sum of partial results, this rank's rows of it."""

    @staticmethod
    def forward(context, value, group):
        context.group = group
        total = value.contiguous().clone()
        dist.all_reduce(total, group=group)
        return _own_rows(total, group)

    @staticmethod
    def backward(context, gradient):
        return _gather(gradient, context.group), None


class ParallelBlock(nn.Module):
    """A block of two linears, the first cut by columns and the second by rows.

    With ``sequence_parallel`` the ranks hold ``tokens / ranks`` rows each between the blocks.
    """

    def __init__(self, whole, group, sequence_parallel=False):
        super().__init__()
        self.group = group
        self.into, self.out = CopyIn, SumOut
        if sequence_parallel:
            self.into, self.out = GatherRows, ScatterRows
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.up = nn.Parameter(whole.up.weight.detach().chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, value):
        inner = torch.tanh(self.into.apply(value, self.group) @ self.up.T)
        return self.out.apply(inner @ self.down.T, self.group)


class Block(nn.Module):
    """The same block in one piece."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, value):
        return self.down(torch.tanh(self.up(value)))


def dtensor_block(whole, mesh):
    """The block cut by torch's own tensor parallelism."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(whole, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def whole_blocks(num_stages):
    torch.manual_seed(1)
    return [Block() for _ in range(num_stages)]


def batch():
    torch.manual_seed(2)
    inputs = [torch.randn(TOKENS, WIDTH) for _ in range(MICROBATCHES)]
    return inputs, [torch.randn(TOKENS, WIDTH) for _ in range(MICROBATCHES)]


def reference_gradients(num_stages):
    """What a plain loop over the microbatches gives, by stage: (up, down)."""
    blocks = whole_blocks(num_stages)
    for x, y in zip(*batch()):
        for block in blocks:
            x = block(x)
        (loss_fn(x, y) / MICROBATCHES).backward()
    return [(block.up.weight.grad, block.down.weight.grad) for block in blocks]


def loss_fn(output, target):
    return (output - target).square().sum()


def own_share(gradients, rank, size):
    up, down = gradients
    return up.chunk(size, 0)[rank], down.chunk(size, 1)[rank]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run_step(mesh, mode="", **options):
    """One step on this rank's stage: (result, its module)."""
    stage, num_stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    tp = mesh["tp"].get_group()
    whole = whole_blocks(num_stages)[stage]
    if mode == "dtensor":
        module = dtensor_block(whole, mesh["tp"])
    else:
        module = ParallelBlock(whole, tp, sequence_parallel=mode == "sequence")
    inputs, targets = batch()
    if mode == "sequence":
        inputs, targets = ([_own_rows(t, tp) for t in part] for part in (inputs, targets))
    is_first, is_last = stage == 0, stage == num_stages - 1
    result = rrfp.run_pipeline(
        {stage: module},
        inputs if is_first else None,
        targets if is_last else None,
        loss_fn if is_last else None,
        group=mesh,
        agreement_group="auto",
        **options,
    )
    return result, module


def gradients_of(module, mode=""):
    if mode == "dtensor":
        return local(module.up.weight.grad), local(module.down.weight.grad)
    return module.up.grad, module.down.grad


def main():
    mode = {"--sequence-parallel": "sequence", "--dtensor": "dtensor"}.get(
        sys.argv[1] if len(sys.argv) > 1 else "", ""
    )
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    result, module = run_step(mesh, mode)
    stage = mesh["pp"].get_local_rank()
    expected = own_share(
        reference_gradients(2)[stage], mesh["tp"].get_local_rank(), mesh["tp"].size()
    )
    for name, gradient, want in zip(("up", "down"), gradients_of(module, mode), expected):
        error = (gradient - want).abs().max().item()
        assert error < 1e-4, f"{name} of stage {stage} is off by {error}"
    order = " ".join(result.report.ranks[0].order)
    print(f"rank {dist.get_rank()} stage {stage}: gradients match; ran {order}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
