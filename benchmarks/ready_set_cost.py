"""What arbitration costs: instructions per task, and nanoseconds beside a locked std::set.

Builds bench_ready_set, counts its instructions under valgrind's callgrind (one thread, 4,096
tasks; repeatable to the digit), and runs ReadySet and a mutex with a std::set in turn under four
producers. Ends with 1 when a figure misses its budget.

    python benchmarks/ready_set_cost.py [--build build/benchmarks] [--out ready_set_cost]
"""

import argparse
import json
import sys
from pathlib import Path

import record
from cpp_program import ROOT, build, instructions_per_call, run, tool

NUM_PAIRS = 8 * 4096
BUDGET_INSTRUCTIONS = 120  # arrive + head + claim
BUDGET_RATIO = 5.0  # locked std::set over ReadySet, four producers
MEASURED = {
    "ready_set": "one task at a time: arrive, head, claim",
    "ready_set_batch": "4,096 arrivals, then head and claim until empty",
    "arbiter": "Arbiter::arrive, select (bf, limit, skip count), commit",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/benchmarks")
    parser.add_argument("--out", help="also write results/OUT.json")
    options = parser.parse_args()

    valgrind = tool("valgrind", "install it (Debian: apt install valgrind)")
    program = build(options.build, "bench_ready_set")
    instructions = {
        what: instructions_per_call(
            valgrind, "*measured_*", program, "instructions", what, NUM_PAIRS
        )
        for what in MEASURED
    }
    contended = json.loads(run(program, "contended").stdout)
    results = {
        "num_tasks": 4096,
        "instructions_per_task": instructions,
        "instructions_of": MEASURED,
        "four_producers": contended,
        "budgets": {"ready_set_instructions": BUDGET_INSTRUCTIONS, "ratio": BUDGET_RATIO},
    }
    print(json.dumps(results, indent=2))
    if options.out:
        record.write(options.out, results)
    within = (
        max(instructions["ready_set"], instructions["ready_set_batch"]) <= BUDGET_INSTRUCTIONS
        and contended["ratio"] >= BUDGET_RATIO
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
