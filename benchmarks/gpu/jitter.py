"""Does readiness pay on a GPU when tasks vary, and what is choosing late worth? One GPU, 8 ranks.

    python benchmarks/gpu/jitter.py [--quick] [--dry] [--device cpu] [--seconds 90]

Every rank is a thread with a stream of its own, and a task is a kernel that waits on one SM, so
that the ranks' tasks run side by side. F takes 5 ms, B 10 (split: I and W half of it each), and
at J1 to J3 some of them longer: with probability p by alpha * max(base, own time) * (0.5 to 1.5).
Draws are by kind, stage and microbatch, the same for every run. Runs alternate in rounds, until
another round would not fit into --seconds; so the guard of `auto`, which wants eight steps of one
kind on end, has no say.

A speed-up is over `1f1b slack=0` of the same round and level; beside it is what rrfp.simulate()
says for the same durations. `launch`: the same steps with tasks of no length, what the host needs
for them. `host_us`: rrfp's own time between two tasks of a rank. `gil_late_us`: how late a
thread that sleeps for 1 ms at a time comes back, median and 95th percentile, less the median of
an idle process: it waits for the interpreter as a worker does that has slept until it may choose.

--device cpu sleeps in place of the kernels (there a task runs when it is chosen, so `lookahead`
changes nothing), --dry simulates only: both are for machines without a GPU.
"""

import time

BEGAN_S = time.monotonic()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402

# Streams that share a hardware queue wait for one another; read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import rrfp  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import record  # noqa: E402

NUM_RANKS = 8
TASK_S = {"F": 0.005, "B": 0.010}
LEVELS = {  # p, base, alpha
    "J0": (0.0, 0.0, 0.0),
    "J1": (0.1, 0.005, 0.5),
    "J2": (0.2, 0.010, 1.0),
    "J3": (0.3, 0.015, 1.5),
}
LATENCY_S = 0.0001  # of a message, in the simulated world
SEED = 20260518
BASELINE = "1f1b slack=0"
RUNS = {
    BASELINE: {"hint": "1f1b", "slack": 0},
    "zb-h1 slack=0": {"hint": "zb-h1", "slack": 0, "split_backward": True},
    "bf": {"hint": "bf"},
    "bfw": {"hint": "bfw", "split_backward": True},
    "auto": {"hint": "auto"},
    "auto split": {"hint": "auto", "split_backward": True},
    "auto, eager": {"hint": "auto", "lookahead": "eager"},
    "auto, 1": {"hint": "auto", "lookahead": 1},
}


def drawn_durations(level, num_microbatches):
    """{(kind, stage, microbatch): seconds} for F, B, I and W; I and W add up to B.

    Nobody waits for the I of stage 0, which has no input gradient: there W is all of B.
    """
    probability, base_s, alpha = LEVELS[level]
    rng = random.Random(f"{SEED} {level}")
    durations = {}
    for kind, own_s in TASK_S.items():
        for stage in range(NUM_RANKS):
            for m in range(num_microbatches):
                struck, share = rng.random() < probability, 0.5 + rng.random()
                extra_s = alpha * max(base_s, own_s) * share if struck else 0.0
                durations[kind, stage, m] = own_s + extra_s
                if kind == "B":
                    input_s = (own_s + extra_s) / 2 if stage > 0 else 0.0
                    durations["I", stage, m] = input_s
                    durations["W", stage, m] = own_s + extra_s - input_s
    return durations


class Delay(torch.autograd.Function):
    """The value as it is; its backward takes a while."""

    @staticmethod
    def forward(ctx, value, wait, seconds):
        ctx.wait, ctx.seconds = wait, seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        ctx.wait(ctx.seconds)
        return gradient, None, None


class DelayedStage(nn.Module):
    """One small product, whose forward and both halves of whose backward take tabled times."""

    def __init__(self, index, wait, width=8):
        super().__init__()
        self.index, self.wait, self.durations = index, wait, {}
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, hidden, microbatch):
        self.wait(self.durations["F", self.index, microbatch])
        weight_s = self.durations["W", self.index, microbatch]
        input_s = self.durations["I", self.index, microbatch]
        weight = Delay.apply(self.weight, self.wait, weight_s)
        return Delay.apply(hidden @ weight, self.wait, input_s), microbatch


def loss_fn(output, target):
    return (output[0] - target).square().mean()


def kernel_wait(device):
    """wait(seconds): a kernel that takes so long, and how many of its cycles are a second."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    rates = []
    for _ in range(4):  # the first one brings the clock up
        events[0].record()
        torch.cuda._sleep(50_000_000)
        events[1].record()
        torch.cuda.synchronize(device)
        rates.append(50_000_000 / (1e-3 * events[0].elapsed_time(events[1])))
    rate = rates[-1]
    return (lambda seconds: torch.cuda._sleep(int(seconds * rate)) if seconds > 0 else None), rate


class Lateness:
    """How late a thread comes back from sleeping for 1 ms, while it is entered."""

    def __enter__(self):
        self.late_us, self._is_over = [], False
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._is_over = True
        self._thread.join()

    def _sample(self):
        while not self._is_over:
            began = time.perf_counter()
            time.sleep(0.001)
            self.late_us.append(1e6 * (time.perf_counter() - began) - 1000)


class Bench:
    """The stages and what runs them."""

    def __init__(self, device, num_microbatches):
        self.on_gpu = device.type == "cuda"
        self.wait, self.cycles_a_second = (
            kernel_wait(device) if self.on_gpu else (lambda s: time.sleep(s) if s > 0 else None, 0)
        )
        self.stages = [DelayedStage(s, self.wait).to(device) for s in range(NUM_RANKS)]
        inputs = torch.ones(2, 8, device=device)
        self.inputs = [(inputs, m) for m in range(num_microbatches)]
        self.targets = [torch.zeros(2, 8, device=device)] * num_microbatches
        with Lateness() as idle:
            time.sleep(0.2)
        self.idle_late_us = statistics.median(idle.late_us)

    def run(self, options, durations):
        """One step: {ms, host_us, gil_late_us, peak_units}."""
        for stage in self.stages:
            stage.durations = durations
            stage.zero_grad()
        self.synchronize()
        with Lateness() as lateness:
            began = time.perf_counter()
            result = rrfp.run_pipeline(
                self.stages, self.inputs, self.targets, loss_fn, num_ranks=NUM_RANKS, **options
            )
            self.synchronize()
            ms = 1000 * (time.perf_counter() - began)
        if result.report.fused:
            raise RuntimeError(f"stages were not split: {result.report.fused}")
        ranks = result.report.ranks
        late_us = [us - self.idle_late_us for us in sorted(lateness.late_us)] or [0.0]
        return {
            "ms": round(ms, 2),
            "host_us": round(1e6 * sum(r.host_s for r in ranks) / sum(r.num_tasks for r in ranks),
                             1),
            "gil_late_us": [round(late_us[int(q * (len(late_us) - 1))], 1) for q in (0.5, 0.95)],
            "num_tasks": sum(r.num_tasks for r in ranks),
            "peak_units": max(r.peak_units for r in ranks),
        }

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()


def simulated_ms(options, durations, num_microbatches):
    known = {name: value for name, value in options.items() if name != "lookahead"}
    world = rrfp.simulate(durations, num_stages=NUM_RANKS, num_microbatches=num_microbatches,
                          latency=LATENCY_S, **known)
    return 1000 * world.makespan_s


def summarise(level, rows, simulated, tell):
    """A row per run: medians over rounds of the step time and of the ratios to the baseline."""
    base = {row["round"]: row["ms"] for row in rows if row["run"] == BASELINE}
    for name in RUNS:
        row = {"what": "step", "level": level, "run": name,
               "simulated_ms": round(simulated[name], 2),
               "simulated_speed_up": round(simulated[BASELINE] / simulated[name], 4)}
        own = [row for row in rows if row["run"] == name]
        if own:
            ratios = [base[r["round"]] / r["ms"] for r in own]
            row["median_ms"] = statistics.median(r["ms"] for r in own)
            row["speed_up"] = round(statistics.median(ratios), 4)
            row["speed_ups"] = [round(ratio, 4) for ratio in ratios]
            row["measured_over_simulated"] = round(row["speed_up"] / row["simulated_speed_up"], 4)
            for key in ("host_us", "peak_units"):
                row[key] = statistics.median(r[key] for r in own)
            row["gil_late_us"] = [statistics.median(r["gil_late_us"][q] for r in own)
                                  for q in (0, 1)]
        tell(row)


def measure(bench, levels, num_microbatches, until_s, most_rounds, tell):
    """{level: rows} of as many rounds as there is time for, one at least."""
    nothing = {key: 0.0 for key in drawn_durations("J0", num_microbatches)}
    for is_first in (True, False):
        for name, options in RUNS.items():
            found = bench.run(options, nothing)
            if not is_first:
                tell({"what": "launch", "run": name, **found,
                      "us_a_task": round(1000 * found["ms"] / found["num_tasks"], 1)})
    rows = {level: [] for level in levels}
    durations = {level: drawn_durations(level, num_microbatches) for level in levels}
    longest_s = 0.0
    for index in range(most_rounds):
        began_s = time.monotonic()
        if began_s + longest_s > until_s:
            break
        for level in levels:
            for name, options in RUNS.items():
                row = {"what": "round", "round": index, "level": level, "run": name,
                       **bench.run(options, durations[level])}
                rows[level].append(row)
                tell(row)
        longest_s = max(longest_s, time.monotonic() - began_s)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two levels, 16 microbatches, once")
    parser.add_argument("--dry", action="store_true", help="simulate only")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=90.0, help="of the whole program")
    parser.add_argument("--out", help="name of the result file, or empty; default: gpu_jitter "
                        "for a whole run on a GPU")
    arguments = parser.parse_args()
    if arguments.out is None:
        is_whole = arguments.device == "cuda" and not arguments.quick and not arguments.dry
        arguments.out = "gpu_jitter" if is_whole else ""
    if arguments.device == "cuda" and not arguments.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device; use --device cpu or --dry")
    levels = ["J0", "J2"] if arguments.quick else list(LEVELS)
    num_microbatches = 16 if arguments.quick else 32
    told = []

    def tell(row):
        told.append(row)
        print(json.dumps(row), flush=True)

    rows, card = {level: [] for level in levels}, "cpu"
    if not arguments.dry:
        device = torch.device(arguments.device, 0)
        bench = Bench(device, num_microbatches)
        card = torch.cuda.get_device_name(device) if bench.on_gpu else "cpu"
        tell({"what": "set-up", "device": card, "cycles_a_second": round(bench.cycles_a_second),
              "idle_late_us": round(bench.idle_late_us, 1), "microbatches": num_microbatches})
        rows = measure(bench, levels, num_microbatches, BEGAN_S + arguments.seconds,
                       1 if arguments.quick else 100, tell)
        if bench.on_gpu:
            tell({"what": "end", "cycles_a_second": round(kernel_wait(device)[1])})
    for level in levels:
        durations = drawn_durations(level, num_microbatches)
        simulated = {name: simulated_ms(options, durations, num_microbatches)
                     for name, options in RUNS.items()}
        summarise(level, rows[level], simulated, tell)
    if arguments.out:
        record.write(arguments.out, {"device": card, "arguments": vars(arguments), "rows": told})


if __name__ == "__main__":
    main()
