"""Instructions that rrfp costs per task, which no other load on the machine changes.

One rank in one process, stages of one operation (as in ``host_cost.py``), under callgrind. A
figure is the difference between steps of two numbers of microbatches, so that what a step costs
as a whole is not in it.

    python benchmarks/host_instructions.py [--out host_instructions]
"""

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile

import host_cost
import record
import torch

WARM_UP, STEPS = 6, 4
FEW, MANY = 16, 80


def instrument(switch):
    """Turn counting in this process on or off."""
    subprocess.run(
        ["callgrind_control", "-i", switch, str(os.getpid())], check=True, capture_output=True
    )


def counted(what, count):
    """Run what is to be counted, in a process that callgrind watches."""
    torch.set_num_threads(1)
    stages = [host_cost.Scale()]
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            gc.collect()
            gc.disable()
            instrument("on")
        if what == "direct":
            host_cost.direct_us(stages, count)
        else:
            host_cost.timed_step(stages, count, True, True)
    instrument("off")


def instructions(what, count):
    """Of all the steps of ``counted``."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            ["valgrind", "--tool=callgrind", "--instr-atstart=no",
             f"--callgrind-out-file={folder}/out", sys.executable, __file__, "--counted", what,
             "--microbatches", str(count)],
            env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False,
        )
    found = re.search(r"Collected : (\d+)", process.stderr)
    if process.returncode or found is None:
        raise SystemExit(process.stderr[-2000:])
    return int(found.group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="host_instructions", help="name of the file, or empty")
    parser.add_argument("--counted", help=argparse.SUPPRESS)
    parser.add_argument("--microbatches", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.counted:
        counted(arguments.counted, arguments.microbatches)
        return
    per_task = {}
    for what in ("direct", "rrfp"):
        difference = instructions(what, MANY) - instructions(what, FEW)
        per_task[what] = round(difference / STEPS / (MANY - FEW) / 2)
    per_task["over direct"] = per_task["rrfp"] - per_task["direct"]
    for name, value in per_task.items():
        print(f"{name:<12}{value:>10,} instructions per task")
    if arguments.out:
        record.write(arguments.out, {"instructions_per_task": per_task})


if __name__ == "__main__":
    main()
