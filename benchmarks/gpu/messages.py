"""Messages between two GPUs in one run: rrfp's channels beside torch's send and recv.

    python benchmarks/gpu/messages.py PROGRAM [--runs 3] [--out gpu_messages]

PROGRAM is gpu_messages, as run_all.sh builds it; RRFP_TEST_NCCL names the NCCL library for it. The
channels alternate; every row is printed as soon as it is known.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import record  # noqa: E402

LIMIT_S = 120
TORCH = ["torchrun", "--nproc-per-node", "2", "--master-port", "29655",
         str(Path(__file__).with_name("torch_messages.py"))]


def rows_of(command, **environment):
    """The JSON lines that a program prints.

    Raises:
        RuntimeError: It failed, or found wrong words.
    """
    done = subprocess.run(command, env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=LIMIT_S, check=False)
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    wrong = [line for line in done.stdout.splitlines()
             if line.startswith("wrong words:") and not line.startswith("wrong words: 0 ")]
    if done.returncode or wrong:
        raise RuntimeError(
            f"{command[0]} ended with {done.returncode} {wrong}: {done.stderr[-800:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    runs = []
    for _ in range(arguments.runs):
        rows = []
        for channel in ("ipc", "nccl"):
            rows += rows_of([arguments.program], RRFP_TEST_CHANNEL=channel)
        rows += rows_of(TORCH)
        runs.append({"rows": rows})
        if arguments.out:
            record.write(arguments.out, {
                "device": f"2x {torch.cuda.get_device_name()}", "runs": runs,
                "units": "[median, 95th percentile] of 60 (idle) or 40 (busy) messages",
            })


if __name__ == "__main__":
    main()
