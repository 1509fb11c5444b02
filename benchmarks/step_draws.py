"""36 steps as data, with what each policy makes of them and a lower bound, for others to reproduce.

``results/step_draws.jsonl`` holds a step a line: its model and seed, durations and latencies in
microseconds by stage and microbatch (a unit of the model is 1,000), the makespan of each policy
in the simulated world, and a bound below which no schedule with the same tasks can come.

    step_draws > draws.jsonl && python benchmarks/step_draws.py draws.jsonl

A test replays every line.
"""

import json
import sys
from pathlib import Path

FILE = Path(__file__).parent / "results/step_draws.jsonl"
POLICIES = {  # split backward, options of rrfp.simulate
    "1f1b": (False, {"hint": "1f1b", "slack": 0}),
    "bf": (False, {"hint": "bf"}),
    "auto": (False, {"hint": "auto"}),
    "auto, mid": (False, {"hint": "auto", "microbatch_order": "mid"}),
    "zb-h1": (True, {"hint": "zb-h1", "slack": 0}),
    "zb-h1 slack 2": (True, {"hint": "zb-h1", "slack": 2}),
    "bfw": (True, {"hint": "bfw"}),
    "auto split": (True, {"hint": "auto"}),
    "auto split, mid": (True, {"hint": "auto", "microbatch_order": "mid"}),
}
LIMITS = {"P": 1, "2P": 2}  # of the number of stages


def at(draw, table, stage, microbatch):
    return draw[table][stage * draw["microbatches"] + microbatch]


def makespan_us(draw, split, options, limit):
    """Of a step whose ranks have learnt nothing yet."""
    import rrfp

    step = rrfp.simulate(
        lambda kind, stage, m: at(draw, kind, stage, m) / 1e6,
        num_stages=draw["stages"],
        num_microbatches=draw["microbatches"],
        latency=lambda kind, stage, m: at(
            draw, "latency_F" if kind == "F" else "latency_B", stage, m) / 1e6,
        max_in_flight=limit * draw["stages"],
        split_backward=split,
        costs=draw["costs"],
        **options,
    )
    return round(step.makespan_s * 1e6)


def lower_bound_us(draw, split):
    """The busiest rank: its work, the soonest it can begin, and, unsplit, what must follow it; or
    the longest way of one microbatch."""
    stages, microbatches = range(draw["stages"]), range(draw["microbatches"])
    back = "I" if split else "B"

    def forward_us(stage, m):  # until the stage has its input
        return sum(at(draw, "F", s, m) + at(draw, "latency_F", s, m) for s in range(stage))

    def backward_us(stage, m):  # from the stage's backward's end to the first stage's
        return sum(at(draw, back, s, m) + at(draw, "latency_B", s + 1, m) for s in range(stage))

    bounds = []
    for stage in stages:
        kinds = "FIW" if split else "FB"
        work = sum(at(draw, kind, stage, m) for kind in kinds for m in microbatches)
        tail = 0 if split else min(backward_us(stage, m) for m in microbatches)
        bounds.append(min(forward_us(stage, m) for m in microbatches) + work + tail)
    last = draw["stages"] - 1
    for m in microbatches:
        way = forward_us(last, m) + at(draw, "F", last, m) + at(draw, back, last, m)
        bounds.append(way + backward_us(last, m) + (at(draw, "W", 0, m) if split else 0))
    return max(bounds)


def evaluated(draw):
    draw["lower_bound_us"] = {"unsplit": lower_bound_us(draw, False),
                              "split": lower_bound_us(draw, True)}
    draw["makespan_us"] = {
        f"{name}, limit {limit}": makespan_us(draw, split, options, LIMITS[limit])
        for name, (split, options) in POLICIES.items() for limit in LIMITS}
    return draw


def main():
    lines = Path(sys.argv[1]).read_text().splitlines()
    FILE.write_text("".join(json.dumps(evaluated(json.loads(line))) + "\n" for line in lines))
    print(f"written: {FILE}, {len(lines)} steps")


if __name__ == "__main__":
    main()
