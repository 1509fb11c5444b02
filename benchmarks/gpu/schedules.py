"""Schedules on two GPUs, rrfp's beside torch's, in one run: step time, memory and host cost.

    torchrun --nproc-per-node 2 benchmarks/gpu/schedules.py [SEQUENCES [OUTPUT.json]]

The model of first_step.py, 16 microbatches of SEQUENCES (default 1) sequences of 2,048 tokens.
One stage per rank, or two of half the size in loop or V placement. The ideal is a stage alone times
17/16. `launch_ms` is the same on sequences of 16 tokens, which leave nothing to do but to launch:
where it comes near the time of the stage alone, the host decides and not the GPU. Runs alternate in
rounds; each row is printed as soon as it is known.
"""

import json
import os
import statistics
import sys

import torch
import torch.distributed as dist
from first_step import BLOCKS, MICROBATCHES, TOKENS, WIDTH, Block, step_ms
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import rrfp

ROUNDS, STEPS, WARM_UP_STEPS = 2, 4, 1
PLACES = {"loop": lambda rank: (rank, rank + 2), "v": lambda rank: (rank, 3 - rank)}


def torch_runs(whole, halves, rank, device, batch, target):
    """{name: step} of torch's schedules."""
    loss_fn = nn.functional.mse_loss

    def step_of(schedule, has_last):
        arguments = (batch,) if rank == 0 else ()
        keywords = {"target": target} if has_last else {}
        return lambda: schedule.step(*arguments, **keywords)

    one = Schedule1F1B(PipelineStage(whole, rank, 2, device), MICROBATCHES, loss_fn=loss_fn)
    runs = {"torch 1F1B": step_of(one, rank == 1)}
    for name, kind, placement in (
        ("torch Interleaved1F1B V=2", ScheduleInterleaved1F1B, "loop"),
        ("torch InterleavedZeroBubble V=2", ScheduleInterleavedZeroBubble, "loop"),
        ("torch ZBVZeroBubble V=2", ScheduleZBVZeroBubble, "v"),
    ):
        places = PLACES[placement](rank)
        stages = [PipelineStage(h, at, 4, device) for h, at in zip(halves, places)]
        schedule = kind(stages, MICROBATCHES, loss_fn=loss_fn)
        runs[name] = step_of(schedule, 3 in places)
    return runs


def rrfp_runs(whole, halves, rank, inputs, targets, reports):
    """{name: step} of rrfp's; each leaves its report in `reports`."""

    def step_of(name, stages, **options):
        own = {
            "microbatches": inputs if 0 in stages else None,
            "targets": targets if max(stages) == (1 if len(stages) == 1 else 3) else None,
            "loss_fn": nn.functional.mse_loss,
        }

        def step():
            result = rrfp.run_pipeline(stages, **own, **options)
            reports[name] = result.report.ranks[0]

        return step

    one = {rank: whole}
    loop, v = (dict(zip(PLACES[name](rank), halves)) for name in ("loop", "v"))
    options = {
        "rrfp 1f1b slack=0": (one, {"hint": "1f1b", "slack": 0}),
        "rrfp auto": (one, {}),
        "rrfp auto split": (one, {"split_backward": True}),
        "rrfp bf": (one, {"hint": "bf"}),
        "rrfp bfw": (one, {"hint": "bfw", "split_backward": True}),
        "rrfp interleaved slack=0 V=2": (loop, {"hint": "interleaved", "slack": 0}),
        "rrfp zbv V=2": (v, {"hint": "zbv", "placement": "v", "split_backward": True}),
    }
    return {name: step_of(name, stages, **more) for name, (stages, more) in options.items()}


def measure(name, step, device, times, peaks):
    """A few steps of one run; what ended them, or None."""
    try:
        torch.cuda.empty_cache()
        for _ in range(WARM_UP_STEPS):
            step_ms(step, device)
        torch.cuda.reset_peak_memory_stats()
        times.setdefault(name, []).extend(step_ms(step, device) for _ in range(STEPS))
        peaks[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    except Exception as error:  # of a schedule that cannot run this model, alike on both ranks
        return f"{type(error).__name__}: {error}"[:200]
    return None


def host_us(report):
    """Of a step's report: what rrfp itself took, per task."""
    return round(1e6 * report.host_s / max(1, report.num_tasks), 1)


def main():
    rank = int(os.environ["RANK"])
    sequences = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    file = open(sys.argv[2], "a") if rank == 0 and len(sys.argv) > 2 else None

    def tell(row):
        if rank == 0:
            print(json.dumps(row), flush=True)
            if file is not None:
                print(json.dumps(row), file=file, flush=True)

    tell({"what": "set-up", "card": torch.cuda.get_device_name(device), "sequences": sequences,
          "torch": torch.__version__, "rrfp": rrfp.build_info()["version"]})
    torch.manual_seed(rank)
    blocks = [Block().to(device, torch.bfloat16) for _ in range(BLOCKS // 2)]
    whole = nn.Sequential(*blocks)
    halves = [nn.Sequential(*blocks[: BLOCKS // 4]), nn.Sequential(*blocks[BLOCKS // 4 :])]
    batch = torch.randn(
        MICROBATCHES * sequences, TOKENS, WIDTH, device=device, dtype=torch.bfloat16
    )
    target = torch.randn_like(batch)
    inputs, targets = batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES)

    def alone(pieces=inputs):
        for x in pieces:
            whole(x.detach().requires_grad_()).backward(x)

    short = [x[:1, :16].contiguous() for x in inputs]
    reports = {}
    runs = {
        "stage alone": alone,
        **rrfp_runs(whole, halves, rank, inputs, targets, reports),
        **torch_runs(whole, halves, rank, device, batch, target),
    }
    times, peaks, launches, failed = {}, {}, [], {}
    for _ in range(ROUNDS):
        for name, step in runs.items():
            if name in failed:
                continue
            whole.zero_grad()
            failure = measure(name, step, device, times, peaks)
            if failure is not None:
                failed[name] = failure
                tell({"what": "step", "run": name, "failed": failure})
                continue
            tell({"what": "round", "run": name, "ms": [round(t, 2) for t in times[name][-STEPS:]]})
        launches.append(step_ms(lambda: alone(short), device))
    ideal = statistics.median(times["stage alone"]) * (MICROBATCHES + 1) / MICROBATCHES
    tell({"what": "ideal", "ms": round(ideal, 2), "launch_ms": [round(t, 1) for t in launches]})
    for name in runs:
        if name not in times:
            continue
        ms = statistics.median(times[name])
        row = {"what": "step", "run": name, "median_ms": round(ms, 2),
               "over_ideal": round(ms / ideal, 4), "peak_gib_rank0": peaks[name]}
        if name in reports:
            row["host_us_a_task_rank0"] = host_us(reports[name])
        tell(row)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
