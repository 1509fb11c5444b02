"""Schedules on two GPUs, rrfp's beside torch's, in one run: step time, memory and host cost.

    torchrun --nproc-per-node 2 benchmarks/gpu/schedules.py [--cases 2 1 2c] [--rounds 4]
        [--out gpu_schedules]

The model of first_step.py, 16 microbatches; a case is how many sequences of 2,048 tokens each has,
with a `c` where both sides get their blocks compiled by torch.compile. One stage per rank, or two
of half the size in loop or V placement. The ideal is a stage alone times 17/16. `launch_ms` is the
same on sequences of 16 tokens, which leave nothing to do but to launch: where it comes near the
time of the stage alone, the host decides and not the GPU. `kernel_ms` and the clock say how much of
a difference is the GPU's own (gpu_ranks.py). Runs alternate in rounds; each row is printed as soon
as it is known.
"""

import argparse
import copy
import json
import statistics
import time

import gpu_ranks
import torch
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

STEPS, WARM_UP_STEPS = 4, 1
IN_PRODUCTS = {"split_backward": True, "add_in_products": True}
PLACES = {"loop": lambda rank: (rank, rank + 2), "v": lambda rank: (rank, 3 - rank)}


def torch_runs(whole, halves, rank, device, batch, target, is_compiled):
    """{name: step} of torch's schedules. Its zero-bubble ones cannot run compiled stages: they keep
    the graph after I, and torch.compile's backward has given its buffers away by then."""
    loss_fn = nn.functional.mse_loss

    def step_of(schedule, has_last):
        arguments = (batch,) if rank == 0 else ()
        keywords = {"target": target} if has_last else {}
        return lambda: schedule.step(*arguments, **keywords)

    one = Schedule1F1B(PipelineStage(whole, rank, 2, device), MICROBATCHES, loss_fn=loss_fn)
    runs = {"torch 1F1B": step_of(one, rank == 1)}
    zero_bubble = () if is_compiled else (
        ("torch InterleavedZeroBubble V=2", ScheduleInterleavedZeroBubble, "loop"),
        ("torch ZBVZeroBubble V=2", ScheduleZBVZeroBubble, "v"),
    )
    for name, kind, placement in (
        ("torch Interleaved1F1B V=2", ScheduleInterleaved1F1B, "loop"), *zero_bubble,
    ):
        places = PLACES[placement](rank)
        stages = [PipelineStage(h, at, 4, device) for h, at in zip(halves, places)]
        schedule = kind(stages, MICROBATCHES, loss_fn=loss_fn)
        runs[name] = step_of(schedule, 3 in places)
    return runs


def rrfp_runs(whole, halves, rank, inputs, targets, reports, is_compiled):
    """{name: step} of rrfp's; each leaves its report in `reports`. The backward of a compiled block
    is one piece, whose products are not seen."""

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

    one, zbv = {rank: whole}, {"hint": "zbv", "placement": "v"}
    loop, v = (dict(zip(PLACES[name](rank), halves)) for name in ("loop", "v"))
    options = {
        "rrfp 1f1b slack=0": (one, {"hint": "1f1b", "slack": 0}),
        "rrfp auto": (one, {}),
        "rrfp auto split": (one, {"split_backward": True}),
        "rrfp bf": (one, {"hint": "bf"}),
        "rrfp auto 2P": (one, {"max_in_flight": 4}),
        "rrfp bfw": (one, {"hint": "bfw", "split_backward": True}),
        "rrfp bfw, add in products": (one, {"hint": "bfw", **IN_PRODUCTS}),
        "rrfp interleaved slack=0 V=2": (loop, {"hint": "interleaved", "slack": 0}),
        "rrfp zbv V=2": (v, {**zbv, "split_backward": True}),
        "rrfp zbv V=2, add in products": (v, {**zbv, **IN_PRODUCTS}),
        "rrfp zbv slack=0 V=2, add in products": (v, {**zbv, **IN_PRODUCTS, "slack": 0}),
    }
    return {name: step_of(name, stages, **more) for name, (stages, more) in options.items()
            if not (is_compiled and "add_in_products" in more)}


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


def parse_case(case):
    sequences = int(case.removesuffix("c"))
    what = "one sequence" if sequences == 1 else f"{sequences} sequences"
    return sequences, f"{what} a microbatch" + (", compiled blocks" if "c" in case else "")


class Case:
    """All runs of one case on this rank."""

    def __init__(self, case, blocks, rank, device, clocks, tell):
        self.rank, self.device, self.clocks, self.tell = rank, device, clocks, tell
        self.sequences, self.note = parse_case(case)
        if "c" in case:
            blocks = copy.deepcopy(blocks)
            for block in blocks:
                block.compile()
        self.whole = nn.Sequential(*blocks)
        halves = [nn.Sequential(*blocks[: BLOCKS // 4]), nn.Sequential(*blocks[BLOCKS // 4 :])]
        batch = torch.randn(
            MICROBATCHES * self.sequences, TOKENS, WIDTH, device=device, dtype=torch.bfloat16
        )
        target = torch.randn_like(batch)
        self.inputs, targets = batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES)
        self.short = [x[:1, :16].contiguous() for x in self.inputs]
        self.reports, self.times, self.peaks, self.failed = {}, {}, {}, {}
        self.states = {}  # of the GPU, in the last round
        self.runs = {
            "stage alone": self.alone,
            **rrfp_runs(self.whole, halves, rank, self.inputs, targets, self.reports, "c" in case),
            **torch_runs(self.whole, halves, rank, device, batch, target, "c" in case),
        }

    def alone(self, pieces=None):
        for x in self.inputs if pieces is None else pieces:
            self.whole(x.detach().requires_grad_()).backward(x)

    def measure(self, rounds):
        """{"note": ..., "steps": [row by run], ...}"""
        launches = []
        for number in range(rounds):
            for name, step in self.runs.items():
                if name in self.failed:
                    continue
                self.whole.zero_grad()
                began = time.monotonic()
                failure = measure(name, step, self.device, self.times, self.peaks)
                if failure is not None:
                    self.failed[name] = failure
                elif number == rounds - 1:
                    self.states[name] = {**self.clocks.since(began), "kernel_ms": round(
                        1000 * gpu_ranks.kernel_s(step), 1)}
                self.tell({"what": "round", "case": self.note, "run": name, "failed": failure,
                           "ms": [round(t, 2) for t in self.times.get(name, [])[-STEPS:]]})
            took = step_ms(lambda: self.alone(self.short), self.device)
            if number:  # the first warms up, and compiles
                launches.append(took)
        ideal = statistics.median(self.times["stage alone"]) * (MICROBATCHES + 1) / MICROBATCHES
        steps = [self.row(name, ideal) for name in self.runs if name in self.times]
        for row in steps:
            self.tell({"what": "step", "case": self.note, **row})
        return {
            "note": self.note, "ideal_ms": round(ideal, 2), "failed": self.failed,
            "launch_ms": round(statistics.median(launches), 1), "steps": steps,
            "rounds_ms": {name: [round(t, 2) for t in times]
                          for name, times in self.times.items()},
        }

    def row(self, name, ideal):
        ms = statistics.median(self.times[name])
        row = {"run": name, "median_ms": round(ms, 2), "over_ideal": round(ms / ideal, 4),
               "peak_gib_rank0": self.peaks[name], **self.states.get(name, {})}
        if name in self.reports:
            row["host_us_a_task_rank0"] = host_us(self.reports[name])
        return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", default=["2", "1", "2c"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rank, device = gpu_ranks.join()

    def tell(row):
        if rank == 0:
            print(json.dumps(row), flush=True)

    card = torch.cuda.get_device_name(device)
    tell({"what": "set-up", "card": card, "torch": torch.__version__,
          "rrfp": rrfp.build_info()["version"]})
    torch.manual_seed(rank)
    blocks = [Block().to(device, torch.bfloat16) for _ in range(BLOCKS // 2)]
    clocks = gpu_ranks.Clocks(device)
    runs = []
    for case in arguments.cases:
        runs.append(Case(case, blocks, rank, device, clocks, tell).measure(arguments.rounds))
        torch.cuda.empty_cache()
        gpu_ranks.keep(arguments.out, {"runs": runs})
    gpu_ranks.leave()


if __name__ == "__main__":
    main()
