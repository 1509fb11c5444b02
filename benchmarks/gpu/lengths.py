"""Sequence lengths that vary, on several GPUs: step time by hint, order and limit, beside what the
simulated world gives for the durations measured here.

    torchrun --nproc-per-node 2 benchmarks/gpu/lengths.py [--draws 3] [--out gpu_lengths]
    torchrun --nproc-per-node 4 benchmarks/gpu/lengths.py [--draws 3] [--out gpu_lengths_4]

Eight blocks of first_step.py on each GPU, 16 microbatches of one sequence each; lengths are
log-normal with a coefficient of variation of 0.4 and a mean of 4,096 tokens. For each draw every
task is first timed alone on a GPU at rest, halves of backwards too; then the variants alternate in
rounds. A ratio is the time of the fixed 1F1B order over the variant's. Each row is printed as soon
as it is known.

A GPU at its power limit computes the slower the busier it is kept. So the simulated world is asked
twice: with the durations at rest, and with those times what the kernels of this very variant took
over the same kernels at rest (`simulated_in_run`; a profiled step of each round gives that).
"""

import argparse
import json
import math
import os
import random
import statistics
import time

import gpu_ranks
import torch
import torch.distributed as dist
from first_step import BLOCKS, MICROBATCHES, WIDTH, Block, step_ms
from split_cost import Enter
from torch import nn

import rrfp
from rrfp.split_backward import run_input_half

MEAN_TOKENS, VARIATION, MULTIPLE = 4096, 0.4, 64
ROUNDS, STEPS = 2, 4
AHEAD_CYCLES = 30_000_000  # longer than launching a task
LATENCY_S = 60e-6  # of 16 MiB between these GPUs (gpu_messages)
BASELINE = "1f1b slack=0"
FIXED = {"hint": "1f1b", "slack": 0}
MID = {"microbatch_order": "mid"}
SPLIT = {"split_backward": True}
TWICE = {"max_in_flight": 2 * int(os.environ["WORLD_SIZE"])}
VARIANTS = {
    BASELINE: FIXED,
    "1f1b slack=0, mid": {**FIXED, **MID},
    "auto, P": {},
    "auto, 2P": TWICE,
    "auto, mid, P": MID,
    "auto, mid, 2P": {**MID, **TWICE},
    "auto split, mid, P": {**SPLIT, **MID},
    "auto split, mid, 2P": {**SPLIT, **MID, **TWICE},
}


def draw_lengths(seed):
    """Tokens by microbatch."""
    rng = random.Random(seed)
    sigma = math.sqrt(math.log(1 + VARIATION**2))
    draws = [rng.lognormvariate(math.log(MEAN_TOKENS) - sigma**2 / 2, sigma)
             for _ in range(MICROBATCHES)]
    return [max(MULTIPLE, MULTIPLE * round(tokens / MULTIPLE)) for tokens in draws]


def seconds_of(work):
    """What the device takes, while the host launches ahead of it as in a pipeline."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


class Tasks:
    """The tasks of one microbatch on this rank, one after the other."""

    def __init__(self, stage, rank, x, target):
        self.stage, self.rank, self.x, self.target = stage, rank, x, target
        self.is_last = rank == dist.get_world_size() - 1
        self.anchor = torch.zeros((), requires_grad=True)
        self.output = self.half = None

    def forward(self):
        self.output = self.stage(Enter.apply(self.anchor, self.x) if self.rank else self.x)
        if self.is_last:
            self.output = nn.functional.mse_loss(self.output, self.target)

    def gradient(self):
        return torch.ones_like(self.output) if self.is_last else self.target

    def backward(self):
        self.output.backward(self.gradient())

    def input_half(self):
        self.half = run_input_half([self.output], [self.gradient()], self.anchor)

    def weight_half(self):
        self.half.run()

    def whole(self, halves):
        """All of the microbatch, for its kernels, as far apart from others as in seconds()."""
        torch.cuda._sleep(AHEAD_CYCLES)
        self.forward()
        if halves:
            self.input_half()
            self.weight_half()
        else:
            self.backward()
        Enter.gradients.clear()

    def seconds(self):
        """{kind: seconds}, medians of three."""
        times = {kind: [] for kind in "FBIW"}
        for _ in range(3):
            times["F"].append(seconds_of(self.forward))
            times["B"].append(seconds_of(self.backward))
            if self.rank:
                self.forward()
                times["I"].append(seconds_of(self.input_half))
                times["W"].append(seconds_of(self.weight_half))
            else:  # no input takes a gradient: W is the whole
                times["I"].append(0.0)
                times["W"].append(times["B"][-1])
            Enter.gradients.clear()
        return {kind: statistics.median(t) for kind, t in times.items()}


class Rest:
    """The tasks of a draw on GPUs at rest, of all ranks."""

    def __init__(self, stage, rank, inputs, targets):
        tasks = [Tasks(stage, rank, x, t) for x, t in zip(inputs, targets, strict=True)]
        mine = [each.seconds() for each in tasks]
        kernels = [  # of F and B; of F, I and W
            gpu_ranks.kernel_s(lambda halves=halves: [each.whole(halves) for each in tasks])
            for halves in (False, bool(rank))]
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (mine, kernels))
        self.tables, self.kernels = zip(*gathered, strict=True)

    def sums(self):
        return [{kind: round(sum(task[kind] for task in table), 4) for kind in "FBIW"}
                for table in self.tables]

    def slower(self, stage, name, kernel_s):
        """How much longer than at rest its tasks took where its kernels took kernel_s."""
        is_split = "split_backward" in VARIANTS[name]
        kinds = "FIW" if is_split else "FB"
        whole = sum(task[kind] for task in self.tables[stage] for kind in kinds)
        return 1 + (kernel_s - self.kernels[stage][is_split]) / whole


def simulated_s(tables, slower, lengths, options):
    def duration(kind, stage, microbatch):
        return slower[stage] * tables[stage][microbatch][kind]

    return rrfp.simulate(
        duration, num_stages=len(tables), num_microbatches=MICROBATCHES, latency=LATENCY_S,
        costs=lengths, **options,
    ).makespan_s


class Runs:
    """Steps of one draw, by variant."""

    def __init__(self, stage, rank, inputs, targets, lengths):
        self.stage, self.rank, self.lengths = stage, rank, lengths
        self.own = {
            "microbatches": inputs if rank == 0 else None,
            "targets": targets if rank == dist.get_world_size() - 1 else None,
            "loss_fn": nn.functional.mse_loss,
        }
        self.host_us = {}

    def step(self, name):
        def run():
            result = rrfp.run_pipeline(
                {self.rank: self.stage}, **self.own, costs=self.lengths, **VARIANTS[name]
            )
            own = result.report.ranks[0]
            self.host_us[name] = round(1e6 * own.host_s / own.num_tasks, 1)

        return run


def measure_draw(seed, stage, rank, device, clocks, tell):
    lengths = draw_lengths(seed)
    torch.manual_seed(100 + seed)
    inputs = [torch.randn(1, tokens, WIDTH, device=device, dtype=torch.bfloat16)
              for tokens in lengths]
    targets = [torch.randn_like(x) for x in inputs]
    rest = Rest(stage, rank, inputs, targets)
    tell({"what": "draw", "seed": seed, "tokens": lengths, "stage_s": rest.sums()})
    runs = Runs(stage, rank, inputs, targets, lengths)
    times, kernels = ({name: [] for name in VARIANTS} for _ in range(2))
    state = {}
    for _ in range(ROUNDS):
        for name in VARIANTS:
            stage.zero_grad()
            step_ms(runs.step(name), device)
            began = time.monotonic()
            times[name] += [step_ms(runs.step(name), device) for _ in range(STEPS)]
            state[name] = clocks.since(began)
            kernels[name].append(gpu_ranks.kernel_s(runs.step(name)))
    own = {name: statistics.median(each) for name, each in kernels.items()}
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    slower = {name: [rest.slower(at, name, kernel_s[name]) for at, kernel_s in enumerate(by_rank)]
              for name in VARIANTS}
    expected = {
        name: [simulated_s(rest.tables, factors, lengths, options)
               for factors in ([1] * len(by_rank), slower[name])]
        for name, options in VARIANTS.items()
    }
    base_ms = statistics.median(times[BASELINE])
    for name in VARIANTS:
        ms = statistics.median(times[name])
        row = {"what": "step", "seed": seed, "run": name, "median_ms": round(ms, 2),
               "ratio": round(base_ms / ms, 4), **state[name],
               "slower_than_at_rest": [round(factor, 4) for factor in slower[name]],
               "host_us_a_task_rank0": runs.host_us[name]}
        for at, what in enumerate(("simulated", "simulated_in_run")):
            ratio = expected[BASELINE][at] / expected[name][at]
            row[f"{what}_ms"] = round(1000 * expected[name][at], 2)
            row[f"{what}_ratio"] = round(ratio, 4)
            row[f"real_over_{what}"] = round(base_ms / ms / ratio, 4)
        tell(row)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rank, device = gpu_ranks.join()
    rows = []

    def tell(row):
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)

    tell({"what": "set-up", "card": torch.cuda.get_device_name(device),
          "rrfp": rrfp.build_info()["version"]})
    torch.manual_seed(rank)
    stage = nn.Sequential(*[Block() for _ in range(BLOCKS // 2)]).to(device, torch.bfloat16)
    clocks = gpu_ranks.Clocks(device)
    for seed in range(arguments.draws):
        measure_draw(seed, stage, rank, device, clocks, tell)
        gpu_ranks.keep(arguments.out, {"rows": rows})
    gpu_ranks.leave()


if __name__ == "__main__":
    main()
