"""Many steps of tiny tasks under random delay: what each process holds, ten times on the way.

Run as a script it writes benchmarks/results/soak.json:

    python tests/distributed/soak.py 4 20000
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from free_port import free_port
from passing_threads import num_threads, wait_for_passing_threads

ROOT = Path(__file__).resolve().parents[2]
NUM_SAMPLES = 10


def held():
    """What this process has of everything that could leak."""
    import gc

    gc.collect()
    wait_for_passing_threads()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    with open("/proc/self/maps") as file:
        segments = sum("/dev/shm/" in line or "memfd:" in line for line in file)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": num_threads(),
        "segments": segments,
        "kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def run_rank(rank, count, port, steps, seed):
    """One process: a stage that is late now and then; prints a sample every tenth of the way."""
    import torch
    import torch.distributed as dist

    import rrfp

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count
    )
    draw = random.Random(seed + rank)

    class Late(torch.nn.Linear):
        def forward(self, x):
            if draw.random() < 0.1:
                time.sleep(0.002 * draw.random())
            return super().forward(x)

    stage = Late(4, 4)
    data = [torch.ones(1 + m, 4) for m in range(4)]
    every = max(1, steps // NUM_SAMPLES)
    for step in range(1, steps + 1):
        stage.zero_grad()
        rrfp.run_pipeline(
            stage, data if rank == 0 else None, data if rank == count - 1 else None,
            torch.nn.functional.mse_loss, stall_timeout_s=120,
        )
        if step % every == 0:
            print(json.dumps({"step": step, **held()}), flush=True)
    dist.destroy_process_group()


def soak(count, steps, seed, timeout_s):
    """The samples of each rank: [[{step, descriptors, threads, segments, kib}]]."""
    arguments = [str(value) for value in (count, free_port(), steps, seed)]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    try:
        ends = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, ends):
        assert rank.returncode == 0, errors
    return [[json.loads(line) for line in out.splitlines()] for out, _ in ends]


def main(count, steps):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import record

    began_s = time.monotonic()
    samples = soak(count, steps, seed=0, timeout_s=6 * 3600)
    record.write("soak", {
        "num_ranks": count,
        "steps": steps,
        "seconds": round(time.monotonic() - began_s, 1),
        "samples": samples,
    })


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        run_rank(*map(int, sys.argv[2:]))
    else:
        main(*map(int, sys.argv[1:3]))
