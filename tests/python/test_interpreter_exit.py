"""A program that ends while threads of its own are inside rrfp has its exit status, not an abort;
a child that a stage forked ends; and ranks may end right after their last step.

Would catch: a thread that asks for the GIL once the interpreter is ending, is unwound, and takes
the process with it ("terminate called without an active exception"); a child whose only thread
waits for the next step; a step that returns on rank 0 before the others were told of its end.
"""

import subprocess
import sys

import pytest

# Each thread is outside the GIL most of the time, and back for a moment again and again. None makes
# a tensor in its loop, or frees its stage when it ends: torch's own guards of the GIL, of which one
# is around the freeing of a tensor, abort as pybind11's do.
WAYS = {
    "simulating": "rrfp.simulate(lambda *task: 1.0, num_stages=8, num_microbatches=64)",
    "waiting for a task": "tasks.claim(1)",
    "finding peers": "rrfp.Pipeline(stage).close()",
}
PROGRAM = """
import sys, threading, time, torch, rrfp
from rrfp import _C

if {is_job}:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)
tasks = _C.OwnTasks([[]], [0], 0)

def work(stage):
    while True:
        {work}

stages = [torch.nn.Linear(4, 4) for _ in range(3)]
for stage in stages:
    threading.Thread(target=work, args=(stage,), daemon=True).start()
time.sleep(0.3)
sys.exit(7)
"""


@pytest.mark.parametrize("way", WAYS)
def test_daemon_threads_inside(way):
    program = PROGRAM.format(work=WAYS[way], is_job=way == "finding peers")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, "terminate" in done.stderr) == (7, False), done.stderr[-3000:]


FORKING = """
import os, sys, torch, rrfp

class Forking(torch.nn.Linear):
    def forward(self, x):
        child = os.fork()
        if child == 0:
            LEAVE
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == STATUS
        return super().forward(x)

batch = [torch.ones(2, 4) for _ in range(2)]
stages = [torch.nn.Linear(4, 4), Forking(4, 4)]
rrfp.run_pipeline(stages, batch, batch, torch.nn.functional.mse_loss)
"""


@pytest.mark.parametrize("leave, status", [
    ("sys.exit(3)", 3), ("return x", 0), ("1 / 0", 1), ("sys.exit(2**40 + 3)", 3),
    ("sys.stdout = None; return x", 0), ("sys.stderr.close(); 1 / 0", 1),
])
def test_a_child_of_a_stage_ends(leave, status):
    """Also one that goes on: it is a copy of this one thread, and no other rank runs in it."""
    program = FORKING.replace("LEAVE", leave).replace("STATUS", str(status))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


# Ranks that end without close(), as a program does that calls os._exit().
LEAVING = """
import os, sys, tempfile, torch, torch.distributed as dist, rrfp

def run(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    batch, stage = [torch.ones(2, 4)] * 2, torch.nn.Linear(4, 4)
    for _ in range(2):
        rrfp.run_pipeline(stage, batch if rank == 0 else None,
                          batch if rank == RANKS - 1 else None, torch.nn.functional.mse_loss)
    os._exit(0)

RANKS = 3
torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    for number in range(10):
        children = []
        for rank in range(RANKS):
            children.append(os.fork())
            if children[-1] == 0:
                run(rank, f"{folder}/{number}")
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
"""


def test_ranks_that_end_right_after_their_last_step():
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
