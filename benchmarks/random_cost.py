"""What keyed random numbers cost: per task, and per operation that draws.

    python benchmarks/random_cost.py [--rounds 15] [--out random_cost]
"""

import argparse
import time

import record
import torch

from rrfp.task_rng import StepRandom

REPEAT = 2000


def us_each(call):
    start = time.perf_counter()
    for _ in range(REPEAT):
        call()
    return 1e6 * (time.perf_counter() - start) / REPEAT


def one_round(small, large):
    figures = {}
    draws = {
        "dropout of 1 Ki": lambda: torch.dropout(small, 0.5, True),
        "dropout of 64 Ki": lambda: torch.dropout(large, 0.5, True),
        "an operation that does not draw": lambda: small + 1,
    }
    for name, draw in draws.items():
        figures[f"{name}, torch"] = us_each(draw)
    for shares_process in (False, True):
        where = "worker thread" if shares_process else "own process"
        step = StepRandom(1, 0, shares_process)
        with step.active():
            figures[f"a task, {where}"] = us_each(lambda step=step: step.begin("F", 1, 2))
            for name, draw in draws.items():
                figures[f"{name}, {where}"] = us_each(draw)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="random_cost", help="name of the result file, or empty")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    small, large = torch.randn(1 << 10), torch.randn(1 << 16)
    rounds = [one_round(small, large) for _ in range(arguments.rounds + 1)][1:]
    table = {name: record.quantiles([r[name] for r in rounds]) for name in rounds[0]}
    for name, (low, middle, high) in table.items():
        print(f"{name:<48}{middle:>8.2f} us   (quartiles {low:.2f} to {high:.2f})")
    if arguments.out:
        record.write(arguments.out, {"us": table})


if __name__ == "__main__":
    main()
