"""Starts the rank programs of tests/distributed on the GPUs of this machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
NUM_GPUS = torch.cuda.device_count() if torch.version.cuda else 0
LAUNCH_LIMIT_S = 200
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")


def launch(num_ranks, *arguments, program="gpu_rank.py", **environment):
    """The JSON lines of all ranks of a program of tests/distributed, and all that they printed.

    Started without torchrun, which ends the other ranks as soon as one of them is killed.
    """
    shared = {**os.environ, **environment, "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/distributed" / program), *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]
    lines, transcript = [], ""
    try:
        deadline = time.monotonic() + LAUNCH_LIMIT_S
        for rank, process in enumerate(processes):
            text, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            lines += [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            transcript += f"rank {rank}: exit {process.returncode}\n{text[-4000:]}\n"
    finally:
        for process in processes:
            process.kill()  # those that have ended do not mind
            process.wait()
    return lines, transcript


def check_launch(num_ranks, *arguments, **environment):
    """The JSON lines of the ranks, each of which must have come to its end."""
    lines, transcript = launch(num_ranks, *arguments, **environment)
    assert sum(1 for line in lines if line.get("done")) == num_ranks, transcript
    return lines
