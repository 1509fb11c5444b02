"""What readiness adds to a fixed order that may hold as many microbatches and has the same order
of microbatches. Simulated, by the engine that runs real steps.

A larger in-flight limit lets `auto` run ahead; a fixed order can be written that runs as far ahead:
1F1B whose ranks begin with twice as many forwards. Beside it, in the same draws, `auto` at the
default limit and at twice that, with and without `mid`. A figure is the geometric mean over draws
of the fixed 1F1B order's time over that of the row.

    python benchmarks/same_memory.py [--draws 30] [--out same_memory]
"""

import argparse
import math
import random

import record
from sleeping_model import packed_durations

import rrfp
from rrfp.agreement import mid_order

RANKS, MICROBATCHES = 8, 32
FORWARD_S, LATENCY_S = 1.0, 0.02


def lengths(rng, noise):
    """Log-normal lengths, coefficient of variation 0.4, known beforehand; noise on every task."""
    sigma = math.sqrt(math.log(1.16))
    loads = [rng.lognormvariate(-sigma**2 / 2, sigma) for _ in range(MICROBATCHES)]
    return {(kind, stage, m): scale * loads[m] * rng.lognormvariate(0, noise)
            for kind, scale in (("F", FORWARD_S), ("B", 2 * FORWARD_S))
            for stage in range(RANKS) for m in range(MICROBATCHES)}, loads


def packed(rng):
    return packed_durations(rng.random(), RANKS, MICROBATCHES, FORWARD_S, balanced=True)


def equal(rng, slow_share=0.0):
    """Equal tasks, some of which take three times as long, which nobody knows beforehand."""
    table = {(kind, stage, m): scale * (3 if rng.random() < slow_share else 1)
             for kind, scale in (("F", FORWARD_S), ("B", 2 * FORWARD_S))
             for stage in range(RANKS) for m in range(MICROBATCHES)}
    return table, None


def late(rng):
    """A message in ten is late by up to four forwards."""
    table = {(kind, stage, m): 4 * rng.random() if rng.random() < 0.1 else LATENCY_S
             for kind in "FB" for stage in range(RANKS) for m in range(MICROBATCHES)}
    return lambda kind, stage, m: table[kind, stage, m]


CASES = {  # durations and costs, and latency
    "lengths vary by 0.4": lambda rng: (*lengths(rng, 0.0), LATENCY_S),
    "the same, 10 % of noise": lambda rng: (*lengths(rng, 0.1), LATENCY_S),
    "the same, 30 % of noise": lambda rng: (*lengths(rng, 0.3), LATENCY_S),
    "packed sequences": lambda rng: (*packed(rng), LATENCY_S),
    "equal tasks, one in ten three times as long": lambda rng: (*equal(rng, 0.1), LATENCY_S),
    "equal tasks, late messages": lambda rng: (*equal(rng), late(rng)),
}


def twice_the_warm_up():
    """1F1B by rank, each with twice as many microbatches in flight as in 1F1B."""
    hint = {}
    for rank in range(RANKS):
        ahead = min(MICROBATCHES, 2 * (RANKS - rank))
        tasks = [f"{rank}F{m}" for m in range(ahead)]
        for m in range(MICROBATCHES):
            tasks.append(f"{rank}B{m}")
            if m + ahead < MICROBATCHES:
                tasks.append(f"{rank}F{m + ahead}")
        hint[rank] = tasks
    return hint


FIXED = {"hint": "1f1b", "slack": 0}
FIXED_TWICE = {"hint": twice_the_warm_up(), "slack": 0, "max_in_flight": 2 * RANKS}
RUNS = {
    "fixed": FIXED,
    "fixed, twice the warm-up": FIXED_TWICE,
    "auto": {},
    "auto, twice the limit": {"max_in_flight": 2 * RANKS},
}


def ratios(case, seed):
    """{run: time of the fixed order over its own}; those with `mid` only where costs are known."""
    durations, costs, latency = CASES[case](random.Random(seed))
    # A list of tasks names microbatches as they were given: so they are given as `mid` has them.
    orders = {"": range(MICROBATCHES), **({", mid": mid_order(costs)} if costs else {})}
    found, peaks = {}, {}
    for name, options in RUNS.items():
        for suffix, order in orders.items():
            step = rrfp.simulate(
                lambda kind, stage, m, order=order: durations[kind, stage, order[m]],
                num_stages=RANKS, num_microbatches=MICROBATCHES, latency=latency,
                costs=costs and [costs[m] for m in order], **options)
            key = name + suffix
            found[key] = step.makespan_s
            peaks[key] = max(step.peak_units)
    return {key: found["fixed"] / seconds for key, seconds in found.items()}, peaks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--out", default="same_memory", help="name of the result file, or empty")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        draws = [ratios(case, seed) for seed in range(arguments.draws)]
        runs = {}
        for key in draws[0][0]:
            logs = [math.log(draw[key]) for draw, _ in draws]
            runs[key] = {"speed_up": round(math.exp(sum(logs) / len(logs)), 4),
                         "least": round(math.exp(min(logs)), 4),
                         "peak_units": max(peaks[key] for _, peaks in draws)}
        rows.append({"case": case, "runs": runs})
        print(case, {key: run["speed_up"] for key, run in runs.items()}, flush=True)
    if arguments.out:
        record.write(arguments.out, {"ranks": RANKS, "microbatches": MICROBATCHES, "rows": rows})


if __name__ == "__main__":
    main()
