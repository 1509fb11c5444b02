"""An ordinary training script and the same one in a pipeline: a few lines apart, the same losses.

Would catch: a pipeline that needs more of a script than the README says, and gradients, clipping
or a schedule that lead training astray over many steps.
"""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
ORDINARY, PIPELINED = "examples/gpt_one_device.py", "examples/gpt_pipelined.py"
STEPS = 200


def changed_lines():
    before, after = ((ROOT / name).read_text().splitlines() for name in (ORDINARY, PIPELINED))
    return [line for line in difflib.unified_diff(before, after, lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))]


def losses_of(command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT,
                          timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(STEPS))
    return [float(loss) for _, loss in found]


def test_the_difference_is_small_and_shown():
    lines = changed_lines()
    assert 0 < len(lines) < 15
    block = re.search(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(),
                      re.MULTILINE | re.DOTALL)
    assert block.group(1).splitlines() == lines


def test_losses_are_the_same_for_200_steps():
    ordinary = losses_of([ORDINARY])
    pipelined = losses_of(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
                           PIPELINED])
    assert ordinary[-1] < ordinary[0] - 2
    assert max(abs(a - b) for a, b in zip(ordinary, pipelined, strict=True)) < 1e-3
