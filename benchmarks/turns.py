"""What turns are worth to the ranks of one process, by the number of ranks.

Stages of one operation, as in host_cost.py. Per round: the same stage functions run directly, a
step whose workers run side by side and one in which they take turns (ADR 0015); a figure is the
median over rounds of the step's time over all its tasks. And how many of the steps that the trial
has left alone since took turns.

    python benchmarks/turns.py [--ranks 2 4 8] [--rounds 25] [--microbatches 64] [--out turns]
"""

import argparse
import contextlib
import time
from unittest import mock

import record
import torch
from host_cost import Scale, batch, direct_us, loss_fn

import rrfp
from rrfp.turn_trial import TurnTrial

WARM_UP, TRIED_STEPS = 3, 30
WAYS = {"side by side": False, "in turn": True}


@contextlib.contextmanager
def forced(takes_turns):
    with mock.patch.object(TurnTrial, "choose", lambda self, kind: takes_turns), \
            mock.patch.object(TurnTrial, "learn", lambda self, *step: None):
        yield


def step_us(pipeline, count):
    inputs, targets = batch(count)
    began = time.perf_counter()
    pipeline.step(inputs, targets, loss_fn, hint="1f1b")
    return 1e6 * (time.perf_counter() - began)


def chosen(pipeline, count):
    """Of the steps after the trial, the share that the trial had in turn."""
    ways = []
    choose = TurnTrial.choose

    def noted(trial, kind):
        ways.append(choose(trial, kind))
        return ways[-1]

    with mock.patch.object(TurnTrial, "choose", noted):
        for _ in range(TRIED_STEPS):
            step_us(pipeline, count)
    return sum(ways[TRIED_STEPS // 2:]) / (TRIED_STEPS - TRIED_STEPS // 2)


def measure(num_ranks, arguments):
    count = arguments.microbatches
    stages = [Scale() for _ in range(num_ranks)]
    num_tasks = 2 * count * num_ranks
    figures = {"direct": [], **{name: [] for name in WAYS}}
    with rrfp.Pipeline(stages) as pipeline:
        share = chosen(pipeline, count)
        for index in range(-WARM_UP, arguments.rounds):
            took = {"direct": direct_us(stages, count)[0]}
            for name, takes_turns in WAYS.items():
                with forced(takes_turns):
                    took[name] = step_us(pipeline, count)
            if index >= 0:
                for name, each in took.items():
                    figures[name].append(each / num_tasks)
    summary = {name: record.quantiles(values) for name, values in figures.items()}
    return {"ranks": num_ranks, "us_per_task": summary, "share_in_turn_by_trial": share}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--out", default="turns", help="name of the result file, or empty")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for num_ranks in arguments.ranks:
        rows.append(measure(num_ranks, arguments))
        middles = {name: round(q[1], 1) for name, q in rows[-1]["us_per_task"].items()}
        print(f"{num_ranks} ranks: {middles} us a task; by trial in turn: "
              f"{rows[-1]['share_in_turn_by_trial']:.0%}", flush=True)
    if arguments.out:
        record.write(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
