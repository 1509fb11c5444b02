"""One of two ranks on GPUs, one stage each, whose second stage handles streams in its own way.

    RANK=0 WORLD_SIZE=2 ... python tests/distributed/gpu_streams_rank.py --case joins

``joins`` computes on a stream of its own, for which the stage's stream waits in the end; gradients
are compared with a plain loop. ``leaves`` leaves such a stream current. ``asserts`` launches a
kernel that fails. Prints one JSON line: the error that the rank got, or that it is done.
"""

import argparse
import copy
import json
import os

import torch
import torch.distributed as dist
from torch import nn

import rrfp

WIDTH, ROWS, MICROBATCHES, STEPS = 256, 256, 10, 2
LATE_CYCLES = 20_000_000  # some ten milliseconds


class LateProduct(torch.autograd.Function):
    """x @ weight, whose backward runs long after it has been launched."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        torch.cuda._sleep(LATE_CYCLES)
        return gradient @ weight.mT, x.mT @ gradient


class Stage(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH)
        self.product = product

    def forward(self, x):
        return self.product(x, self.weight)


def joining(x, weight):
    """On a stream of its own, with the waits and marks that torch asks for. Autograd runs the
    backward there too, and lets go of x before the stage's stream waits for that."""
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        product = LateProduct.apply(x, weight)
    x.record_stream(side)
    here.wait_stream(side)
    product.record_stream(here)
    return product


def leaving(x, weight):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(side)
    return x @ weight


def asserting(x, weight):
    x.new_zeros(4)[torch.tensor([99], device=x.device)]
    return x @ weight


PRODUCTS = {"joins": joining, "leaves": leaving, "asserts": asserting}


def loss_fn(output, target):
    return (output - target).square().mean()


def gradients_alone(stages, batch):
    """Of both weights, in a plain loop on this device."""
    stages = [copy.deepcopy(stage) for stage in stages]
    for x in batch:
        hidden = x
        for stage in stages:
            hidden = hidden @ stage.weight
        (loss_fn(hidden, x) / len(batch)).backward()
    return [stage.weight.grad for stage in stages]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=sorted(PRODUCTS), required=True)
    parser.add_argument("--transport", default="ipc")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    stages = [Stage(torch.matmul), Stage(PRODUCTS[options.case])]
    stages = [stage.to(device) for stage in stages]
    try:
        for _ in range(STEPS):
            batch = [torch.randn(ROWS, WIDTH, dtype=torch.float64).to(device)
                     for _ in range(MICROBATCHES)]
            stages[rank].zero_grad()
            rrfp.run_pipeline(
                stages[rank], batch if rank == 0 else None, batch if rank == 1 else None, loss_fn,
                transport=options.transport, max_in_flight=[MICROBATCHES, 1],
                split_backward=False, stall_timeout_s=60.0,
            )
            expected = gradients_alone(stages, batch)[rank]
            found = stages[rank].weight.grad
            error = ((found - expected).norm() / expected.norm()).item()
            assert error < 1e-10, f"gradients differ by {error}"
        line = {"done": True}
    except (rrfp.StageError, rrfp.DeviceError) as error:
        line = {"error": type(error).__name__, "rank": error.rank, "text": str(error)[:400]}
    print(json.dumps(line), flush=True)
    os._exit(0)  # a device that has failed cannot be left in good order


if __name__ == "__main__":
    main()
