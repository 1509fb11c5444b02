"""What arbitration costs: instructions per task, and nanoseconds beside a locked std::set.

Builds bench_ready_set, counts its instructions under valgrind's callgrind (one thread, 4,096
tasks; repeatable to the digit), and runs ReadySet and a mutex with a std::set in turn under four
producers. Ends with 1 when a figure misses its budget.

    python benchmarks/ready_set_cost.py [--build build/benchmarks] [--out ready_set_cost]
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import record

ROOT = Path(__file__).resolve().parents[1]
NUM_PAIRS = 8 * 4096
BUDGET_INSTRUCTIONS = 120  # arrive + head + claim
BUDGET_RATIO = 5.0  # locked std::set over ReadySet, four producers
MEASURED = {
    "ready_set": "one task at a time: arrive, head, claim",
    "ready_set_batch": "4,096 arrivals, then head and claim until empty",
    "arbiter": "Arbiter::arrive, select (bf, limit, skip count), commit",
}


def tool(name, remedy):
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        sys.exit(f"{name} was not found; {remedy}")
    return found


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n"
            f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done


def build(folder):
    cmake = tool("cmake", "run python -m pip install cmake ninja")
    run(cmake, "-S", ROOT, "-B", folder, "-DRRFP_BUILD_PYTHON=OFF", "-DRRFP_BUILD_TESTS=ON")
    run(cmake, "--build", folder, "--target", "bench_ready_set")
    return folder / "bench_ready_set"


def instructions_per_pair(valgrind, program, what):
    """Instructions inside the functions measured_* alone, per task."""
    done = run(
        valgrind,
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        "--toggle-collect=*measured_*",
        program,
        "instructions",
        what,
        NUM_PAIRS,
    )
    collected = re.search(r"Collected : (\d+)", done.stderr)
    return round(int(collected.group(1)) / int(done.stdout), 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/benchmarks")
    parser.add_argument("--out", help="also write results/OUT.json")
    options = parser.parse_args()

    valgrind = tool("valgrind", "install it (Debian: apt install valgrind)")
    program = build(options.build)
    instructions = {what: instructions_per_pair(valgrind, program, what) for what in MEASURED}
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
