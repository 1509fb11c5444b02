"""Many steps of tiny tasks: nothing that a process holds may grow.

Would catch: a descriptor, thread, mapping or message that stays behind after each step.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from launch import free_port

RANK = textwrap.dedent("""
    import gc, json, os, random, sys, threading, time
    import torch, torch.distributed as dist
    import rrfp
    rank, count, port, steps, seed = (int(a) for a in sys.argv[1:6])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=count)
    draw = random.Random(seed + rank)

    class Late(torch.nn.Linear):
        def forward(self, x):
            if draw.random() < 0.02:
                time.sleep(0.002 * draw.random())
            return super().forward(x)

    stage = Late(4, 4)
    data = [torch.ones(1 + m, 4) for m in range(4)]

    def held():
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return {"descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "shared": sum("rrfp" in name for name in os.listdir("/dev/shm")),
                "kib": pages * os.sysconf("SC_PAGE_SIZE") // 1024}

    for step in range(steps):
        stage.zero_grad()
        rrfp.run_pipeline(stage, data if rank == 0 else None, data if rank == count - 1 else None,
                          torch.nn.functional.mse_loss, stall_timeout_s=120)
        if step in (steps // 4, steps - 1):
            print(json.dumps(held()), flush=True)
    dist.destroy_process_group()
""")


@pytest.mark.time_limit(3000)
@pytest.mark.parametrize(
    ("count", "steps"), [(2, 300), pytest.param(4, 20_000, marks=pytest.mark.slow)]
)
def test_nothing_grows(count, steps, seed):
    port = free_port()
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, *map(str, (rank, count, port, steps, seed))],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
        for rank in range(count)
    ]
    try:
        ends = [rank.communicate(timeout=2900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, errors) in zip(ranks, ends):
        assert rank.returncode == 0, errors
        early, late = map(json.loads, out.splitlines())
        for name in ("descriptors", "threads", "shared"):
            assert late[name] <= early[name], (name, early, late)
        # The allocator's own growth; 150 bytes a step would show in the long form.
        assert late["kib"] - early["kib"] < 2048, (early, late)
