"""A program that ends while threads of its own are inside rrfp has its exit status, not an abort.

Would catch: a thread that asks for the GIL once the interpreter is ending, is unwound, and takes
the process with it ("terminate called without an active exception").
"""

import subprocess
import sys

import pytest

# Each thread is outside the GIL most of the time, and back for a moment again and again.
WAYS = {
    "simulating": "rrfp.simulate(lambda *task: 1.0, num_stages=8, num_microbatches=64)",
    "waiting for a task": "tasks.claim(1)",
}
PROGRAM = """
import sys, threading, time, rrfp
from rrfp import _C

tasks = _C.OwnTasks([[]], [0], 0)

def work():
    while True:
        {work}

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
sys.exit(7)
"""


@pytest.mark.parametrize("way", WAYS)
def test_daemon_threads_inside(way):
    program = PROGRAM.format(work=WAYS[way])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, "terminate" in done.stderr) == (7, False), done.stderr[-3000:]
