"""How soon an idle worker starts what has arrived on its GPU, and what a task costs the host.

    torchrun --nproc-per-node 2 benchmarks/gpu/arrival.py [--rounds 15] [--out gpu_arrival]

host_cost.py's stages of one operation, one on each of two GPUs. `arrival to start`: from the moment
at which rank 1's host knows that the input is there to the call of its stage function, in steps of
one microbatch whose first stage sleeps, so that the worker is idle. `host`: rrfp's own time from
the end of a launch to the next choice, per task, in steps of 64 microbatches.
"""

import argparse

import torch
import torch.distributed as dist
import two_gpus
from host_cost import HOPS, WIDTH, Scale, loss_fn

import rrfp


def step(stage, rank, device, count, **options):
    """This rank's line of the report."""
    batch = [torch.ones(4, WIDTH, device=device) for _ in range(count)]
    result = rrfp.run_pipeline(
        {rank: stage}, batch if rank == 0 else None, batch if rank == 1 else None, loss_fn,
        **options,
    )
    return result.report.ranks[0]


def arrivals_us(rank, device):
    """From arrival to start on rank 1, one of each step but the first tenth."""
    stage = Scale(0.003 if rank == 0 else 0.0).to(device)
    found = []
    for _ in range(HOPS):
        line = step(stage, rank, device, 1)
        if rank == 1:
            found.append((stage.started[-1] - line.records[0].ready_ns) / 1e3)
    return found[HOPS // 10 :]


def host_us(rank, device, rounds):
    stage = Scale().to(device)
    lines = [step(stage, rank, device, 64) for _ in range(rounds + 3)][3:]
    return [1e6 * line.host_s / line.num_tasks for line in lines]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rank, device = two_gpus.join()
    mine = {"arrival_to_start_us": arrivals_us(rank, device),
            "host_us": host_us(rank, device, arguments.rounds)}
    both = [None, None]
    dist.all_gather_object(both, mine)
    figures = {name: two_gpus.record.quantiles(both[1][name]) for name in mine}
    if rank == 0:
        print(figures, flush=True)
    two_gpus.keep(arguments.out, {"quartiles": figures})
    two_gpus.leave()


if __name__ == "__main__":
    main()
