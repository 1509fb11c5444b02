"""What a decision of an agreement group costs, beside an all-gather of one integer.

For each number of members: builds agreement_decisions and times it with a process per member,
each on a core of its own; all-gathers one integer over gloo between as many processes, and over
NCCL where there are as many GPUs; counts instructions under valgrind's callgrind where that is
installed. The variants alternate. Prints a JSON row for each number and ends with 1 when a
decision misses its budget.

    python benchmarks/agreement_cost.py [--members 2 4 8] [--rounds 3] [--out agreement_cost]
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import record
from cpp_program import ROOT, build, instructions_per_call, run
from processes import run_ranks

BUDGET_MEDIAN_NS = 1000
BUDGET_P99_NS = 5000
NUM_CALLS = 8 * 512
NUM_GATHERS = 2000
NUM_WARM_UP = 100
QUANTILES = {"p50_ns": 0.5, "p90_ns": 0.9, "p99_ns": 0.99, "p999_ns": 0.999}


def gather_times(rank, num_ranks, backend):
    """Nanoseconds of each all-gather of one integer, entered by all ranks at once."""
    import torch
    import torch.distributed as dist

    cores = sorted(os.sched_getaffinity(0))
    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if not on_gpu and len(cores) >= num_ranks:
        os.sched_setaffinity(0, {cores[rank]})
    group = dist.new_group(backend=backend) if on_gpu else None
    own = torch.tensor([rank], device=device)
    gathered = [torch.empty_like(own) for _ in range(num_ranks)]
    times = []
    for n in range(NUM_WARM_UP + NUM_GATHERS):
        if n % 50 == 0:
            dist.barrier()
        start_ns = time.perf_counter_ns()
        dist.all_gather(gathered, own, group=group)
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - start_ns)
    assert [int(value) for value in gathered] == list(range(num_ranks))
    return times[NUM_WARM_UP:]


def quantiles_of(times):
    ranked = sorted(times)
    return {name: ranked[int(q * (len(ranked) - 1))] for name, q in QUANTILES.items()}


def all_gather(num_members, backend):
    answers = run_ranks(gather_times, num_members, num_members, backend, timeout_s=300)
    return quantiles_of([each for times in answers for each in times])


def has_gpus(number):
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() >= number


def middle(rounds):
    """The median over rounds of each figure; ``rounds`` are {row: {quantile: ns}}."""
    rows = [name for name, row in rounds[0].items() if isinstance(row, dict)]
    return {
        row: {q: round(statistics.median(r[row][q] for r in rounds)) for q in QUANTILES}
        for row in rows
    }


def measure(program, num_members, num_rounds):
    rounds = []
    for _ in range(num_rounds):
        figures = json.loads(run(program, "timing", num_members).stdout)
        figures["all_gather_gloo"] = all_gather(num_members, "gloo")
        if has_gpus(num_members):
            figures["all_gather_nccl"] = all_gather(num_members, "nccl")
        rounds.append(figures)
    row = {"members": num_members, **middle(rounds), "rounds": rounds}
    valgrind = shutil.which("valgrind")
    if valgrind is not None:
        row["instructions"] = {
            what: instructions_per_call(
                valgrind, f"*measured_{what}*", program, "instructions", num_members, NUM_CALLS
            )
            for what in ("decide", "arrive")
        }
    return row


def is_within(row):
    decide = row["decide"]
    return decide["p50_ns"] <= BUDGET_MEDIAN_NS and decide["p99_ns"] <= BUDGET_P99_NS


def main():
    num_cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+",
                        default=[n for n in (2, 4, 8) if n <= num_cores])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--build", type=Path, default=ROOT / "build/benchmarks")
    parser.add_argument("--out", help="also write results/OUT.json")
    options = parser.parse_args()
    if not options.members or max(options.members) > num_cores:
        parser.error(f"each member needs a core of its own; this process may use {num_cores}")

    program = build(options.build, "agreement_decisions")
    rows = []
    for num_members in options.members:
        rows.append(measure(program, num_members, options.rounds))
        shown = {name: value for name, value in rows[-1].items() if name != "rounds"}
        print(json.dumps(shown), flush=True)
    results = {
        "table": rows,
        "budgets": {"decide_p50_ns": BUDGET_MEDIAN_NS, "decide_p99_ns": BUDGET_P99_NS},
    }
    if options.out:
        record.write(options.out, results)
    return 0 if all(is_within(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
