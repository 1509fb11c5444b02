"""How soon an idle worker starts what has arrived on its GPU, and what a task costs the host.

    torchrun --nproc-per-node 2 benchmarks/gpu/arrival.py [--rounds 15] [--out gpu_arrival]

host_cost.py's stages of one operation, one on each of two GPUs, in steps of one microbatch for
which rank 1's worker waits, idle. Either the first stage's host is late (it sleeps before it
launches): `arrival to start` is then from the moment at which rank 1's host knows that the input
will be there to the call of its stage function. Or its GPU is (a kernel that spins): then, from
the end of the first stage's last kernel, `computed to call` says when rank 1's stage function is
called, less than zero where it has been called before, and `computed to kernel` when the first
kernel of that stage starts. `plain` is what the same stage takes to be called and launched without
rrfp, warm and after a sleep as long: how slow an idle processor is at first. `host`: rrfp's own
time from the end of a launch to the next choice, per task, in steps of 64 microbatches.
"""

import argparse
import time
from itertools import pairwise

import gpu_ranks
import torch
import torch.distributed as dist
from host_cost import HOPS, WIDTH, Scale, loss_fn, plain_us
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import rrfp

LATE_S = 0.003
SPIN_CYCLES = 6_000_000  # 3 ms at the usual clock
PROFILED_STEPS = 60
BEFORE_NS = 5_000  # how far the clocks of two GPUs may be apart


class Computing(Scale):
    """A stage whose GPU takes a while for it."""

    def forward(self, hidden):
        torch.cuda._sleep(SPIN_CYCLES)
        return super().forward(hidden)


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
    stage = Scale(LATE_S if rank == 0 else 0.0).to(device)
    found = []
    for _ in range(HOPS):
        line = step(stage, rank, device, 1)
        if rank == 1:
            found.append((stage.started[-1] - line.records[0].ready_ns) / 1e3)
    return found[HOPS // 10 :]


def profiled(rank, device):
    """[(name, start, end)] of this GPU's kernels, and when the stage function was called; in ns of
    the same clock."""
    stage = (Computing if rank == 0 else Scale)().to(device)
    for _ in range(PROFILED_STEPS // 10):
        step(stage, rank, device, 1)
    stage.started.clear()
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED_STEPS):
            step(stage, rank, device, 1)
        torch.cuda.synchronize()
    offset_ns = time.time_ns() - time.monotonic_ns()
    kernels = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in seen.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
        and not event.name().startswith(("Memcpy", "Memset"))
    )
    return kernels, [called_ns + offset_ns for called_ns in stage.started]


def after_computed_us(first, second):
    """{figure: one of each step}, of what both ranks' ``profiled`` gave."""
    computed_ns = [
        end for (_, _, name), (_, end, _) in pairwise(first[0]) if "spin_kernel" in name
    ]
    assert len(computed_ns) == len(second[1]) == PROFILED_STEPS, (len(computed_ns), len(second[1]))
    starts = [start for start, _, _ in second[0]]
    return {
        "computed_to_call_us": [
            (called - computed) / 1e3
            for computed, called in zip(computed_ns, second[1], strict=True)
        ],
        "computed_to_kernel_us": [
            (next(s for s in starts if s > computed - BEFORE_NS) - computed) / 1e3
            for computed in computed_ns
        ],
    }


def host_us(rank, device, rounds):
    stage = Scale().to(device)
    lines = [step(stage, rank, device, 64) for _ in range(rounds + 3)][3:]
    return [1e6 * line.host_s / line.num_tasks for line in lines]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rank, device = gpu_ranks.join()
    plain = Scale().to(device), torch.ones(4, WIDTH, device=device)
    mine = {
        "arrival_to_start_us": arrivals_us(rank, device),
        "plain_warm_us": plain_us(*plain, 0.0, torch.cuda.synchronize),
        "plain_after_sleep_us": plain_us(*plain, LATE_S, torch.cuda.synchronize),
        "host_us": host_us(rank, device, arguments.rounds),
    }
    both = [None, None]
    dist.all_gather_object(both, (mine, profiled(rank, device)))
    if rank == 0:
        found = {**both[1][0], **after_computed_us(both[0][1], both[1][1])}
        figures = {name: gpu_ranks.record.quantiles(values) for name, values in found.items()}
        for name, (low, middle, high) in figures.items():
            print(f"{name:<24}{middle:>8.1f}   ({low:.1f} to {high:.1f})", flush=True)
        gpu_ranks.keep(arguments.out, {"quartiles": figures})
    gpu_ranks.leave()


if __name__ == "__main__":
    main()
