"""The vision + text example, small, in one process and in three; and that its check can fail.

The script compares its first steps with a plain loop and exits with 1 when they differ.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the pictures are scikit-learn's: pip install -e '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/vision_text.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]


def run(command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT,
                          timeout=600, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def check(done):
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    output = done.stdout
    counts = json.loads(re.search(r"pictures per microbatch .*: (\[.*\])", output).group(1))
    assert counts[3] == counts[7] == 0 and len(set(counts)) > 4
    losses = [float(text) for text in re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)]
    assert losses[-1] < 0.6 * losses[0]
    loss, grad = map(float, re.search(r"difference in loss (\S+), in gradient (\S+)",
                                      output).groups())
    assert loss <= 1e-4 and 0 < grad <= 1e-4
    # Guessing is right in 1 of 10, always saying 9 in about 1 of 3.
    assert int(re.search(r"unseen pictures: (\d+) % right", output).group(1)) > 45


def test_one_process():
    check(run([SCRIPT, "--steps", "60"]))


def test_three_processes():
    check(run([*TORCHRUN, SCRIPT, "--steps", "60"]))


def test_swapped_pictures_would_be_noticed(tmp_path):
    """A pipeline that gives a microbatch another one's pictures must not pass."""
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(
        "import runpy, sys\n"
        "import rrfp\n"
        "original = rrfp.run_pipeline\n"
        "def swapped(stages, inputs, **options):\n"
        "    inputs[0] = [*inputs[0]]\n"
        "    inputs[0][0] = None if inputs[0][0] is None else inputs[0][0].flip(0)\n"
        "    return original(stages, inputs, **options)\n"
        "rrfp.run_pipeline = swapped\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        f"runpy.run_path({str(ROOT / SCRIPT)!r}, run_name='__main__')\n")
    done = run([str(spoiled), "--steps", "3"])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "computed something else" in done.stderr
