"""What are waiting and the guard worth, really and as simulated? Four processes, sleeping tasks.

Every variant runs the same seeded steps in processes of its own; the first eight, from which the
guard learns, are not scored. A ratio is the time of the fixed 1F1B order over that of the variant,
step by step; beside it stands the ratio of the simulated world, which learns from step to step as
the processes do. Durations: packed sequences (``sleeping_model.py``), and equal tasks with
jitter J2: one task in five takes longer, by about its own time.

    python benchmarks/waiting.py [--steps 12] [--forward-ms 20]
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections import deque

import record
import sleeping_model as model
from processes import run_ranks

NUM_RANKS, NUM_MICROBATCHES = 4, 16
LATENCY_S = 0.0002
NUM_LEARNT = 8  # steps; the guard goes on with one in four
BASELINE = "fixed 1F1B"
VARIANTS = {  # hint, slack, waiting, guard
    BASELINE: ("1f1b", 0, False, False),
    "auto": ("auto", "auto", False, False),
    "auto, waiting": ("auto", "auto", True, False),
    "auto, guard": ("auto", "auto", False, True),
    "auto, waiting, guard": ("auto", "auto", True, True),
}
JITTER_PROBABILITY, JITTER_BASE_S, JITTER_ALPHA = 0.2, 0.010, 1.0


def jittered_durations(seed, forward_s):
    """{(kind, stage, microbatch): seconds}: F and twice that for B, lengthened by J2."""
    rng = random.Random(seed)
    durations = {}
    for kind, base_s in (("F", forward_s), ("B", 2 * forward_s)):
        for stage in range(NUM_RANKS):
            for m in range(NUM_MICROBATCHES):
                struck = rng.random() < JITTER_PROBABILITY
                extra_s = JITTER_ALPHA * max(JITTER_BASE_S, base_s) * (0.5 + rng.random())
                durations[kind, stage, m] = base_s + (extra_s if struck else 0.0)
    return durations


def durations_of(workload, index, forward_s):
    if workload == "J2":
        return jittered_durations(index, forward_s)
    return model.packed_durations(index, NUM_RANKS, NUM_MICROBATCHES, forward_s, balanced=True)[0]


def measure_rank(rank, arguments, workload, hint, slack):
    """Seconds of every step by rank 0's clock, from the first rank's start to the last's end."""
    import torch.distributed as dist

    import rrfp

    stage = model.SleepingStage(rank)
    inputs, targets = model.batch(NUM_MICROBATCHES)
    seconds = []
    for index in range(-1, NUM_LEARNT + arguments.steps):  # -1 sets up
        stage.durations = durations_of(workload, max(index, 0), arguments.forward_ms / 1000)
        dist.barrier()
        start = time.monotonic()
        rrfp.run_pipeline(
            {rank: stage},
            inputs if rank == 0 else None,
            targets if rank == NUM_RANKS - 1 else None,
            model.loss_fn,
            hint=hint,
            slack=slack,
            max_in_flight=NUM_RANKS,
        )
        spans = [None] * NUM_RANKS if rank == 0 else None
        dist.gather_object((start, time.monotonic()), spans)
        if rank == 0 and index >= 0:
            seconds.append(max(end for _, end in spans) - min(begun for begun, _ in spans))
    return seconds


def measured_s(arguments, workload, variant):
    hint, slack, waiting, guard = VARIANTS[variant]
    os.environ["RRFP_WAITING"] = "on" if waiting else "off"
    os.environ["RRFP_GUARD"] = "on" if guard else "off"
    return run_ranks(measure_rank, NUM_RANKS, arguments, workload, hint, slack, timeout_s=600)[0]


class SimulatedTraining:
    """The steps of a variant in the simulated world, one after the other."""

    def __init__(self, variant):
        from rrfp import _C
        from rrfp.layout import make_layout

        self.hint, slack, self.waiting, self.has_guard = VARIANTS[variant]
        self.slack = _C.AUTO_SLACK if slack == "auto" else slack
        self.core, self.graph = _C, make_layout(NUM_RANKS, None, "loop").graph
        self.times = _C.LearntTimes(NUM_RANKS, 1)
        self.records = deque(maxlen=NUM_LEARNT)
        self.choice = None
        self.num_steps = 0

    def plan(self, hint, slack):
        return self.core.StepPlan(self.graph, NUM_MICROBATCHES, [], hint, [], slack,
                                  [NUM_RANKS] * NUM_RANKS, False, waiting=self.waiting)

    def step_s(self, durations):
        latency_ns = round(LATENCY_S * 1e9)
        table_ns = [round(durations[kind, stage, m] * 1e9) for kind in "FB"
                    for stage in range(NUM_RANKS) for m in range(NUM_MICROBATCHES)]
        plan = self.plan(*(self.choice or (self.hint, self.slack)))
        world = self.core.simulate(plan, table_ns, [latency_ns] * len(table_ns), False, self.times)
        self.num_steps += 1
        if self.has_guard and (self.num_steps <= NUM_LEARNT or self.num_steps % 4 == 0):
            self.learn(table_ns, latency_ns)
        return world.makespan_ns / 1e9

    def learn(self, table_ns, latency_ns):
        per_kind = NUM_RANKS * NUM_MICROBATCHES
        last = per_kind - NUM_MICROBATCHES
        travels_ns = [latency_ns] * last + [-1] * NUM_MICROBATCHES
        travels_ns += [-1] * NUM_MICROBATCHES + [latency_ns] * last
        unused = [-1] * (2 * per_kind)
        self.records.append((NUM_MICROBATCHES, table_ns + unused, travels_ns + unused, []))
        if len(self.records) == NUM_LEARNT:
            rule = self.plan(self.hint, self.slack)
            self.choice = self.core.guard(rule, list(self.records), [], NUM_LEARNT)


def simulated_s(arguments, workload, variant):
    training = SimulatedTraining(variant)
    return [training.step_s(durations_of(workload, index, arguments.forward_ms / 1000))
            for index in range(NUM_LEARNT + arguments.steps)]


def compare(arguments, workload):
    """A row per variant: medians over the scored steps of step time and ratios."""
    rows, base = [], None
    for variant in VARIANTS:
        real = measured_s(arguments, workload, variant)[NUM_LEARNT:]
        expected = simulated_s(arguments, workload, variant)[NUM_LEARNT:]
        if base is None:
            base = real, expected
        ratios = [a / b for a, b in zip(base[0], real, strict=True)]
        simulated = [a / b for a, b in zip(base[1], expected, strict=True)]
        kept = [a / b for a, b in zip(ratios, simulated, strict=True)]
        rows.append({"workload": workload, "variant": variant,
                     "step_ms": 1e3 * statistics.median(real),
                     "speed_up": statistics.median(ratios),
                     "simulated_speed_up": statistics.median(simulated),
                     "measured_over_simulated": statistics.median(kept),
                     "real_s": real, "simulated_s": expected})
        print(f"{workload:<8}{variant:<22}{rows[-1]['step_ms']:>8.0f} ms"
              f"{rows[-1]['speed_up']:>8.3f}{rows[-1]['simulated_speed_up']:>8.3f}"
              f"{rows[-1]['measured_over_simulated']:>8.3f}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="that are scored")
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--out", default="waiting", help="name of the result file, or empty")
    arguments = parser.parse_args()
    print(f"{'':<38}   over {BASELINE}: measured, simulated, their ratio")
    rows = [row for workload in ("packed", "J2") for row in compare(arguments, workload)]
    if arguments.out:
        record.write(arguments.out, {"arguments": vars(arguments), "rows": rows})
    off = [row for row in rows if abs(row["measured_over_simulated"] - 1) > 0.03]
    for row in off:
        print(f"{row['workload']}, {row['variant']}: measured is "
              f"{row['measured_over_simulated']:.3f} of simulated, wanted 0.97 to 1.03")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
