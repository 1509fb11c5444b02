"""examples/04_gpus.py: a device for each process, and something is learnt on it.

Would catch: a recipe for GPUs that leaves a process on another's GPU, or tensors on the CPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_launch import NUM_GPUS, two_gpus

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
           "examples/04_gpus.py"]


def devices_of(**environment):
    """The device of each rank of a run, in which the loss must have fallen."""
    done = subprocess.run([sys.executable, *COMMAND], capture_output=True, text=True, cwd=ROOT,
                          timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout,
                                                 re.MULTILINE)]
    assert len(losses) == 40 and losses[0] > 1.9 and losses[-1] < 1.2, losses
    # Both ranks print at once, so one line may begin in another.
    return dict(re.findall(r"rank (\d) trains on (cpu|cuda:\d)", done.stdout))


def test_on_the_cores():
    assert devices_of(CUDA_VISIBLE_DEVICES="") == {"0": "cpu", "1": "cpu"}


@pytest.mark.gpu
@two_gpus
def test_a_gpu_for_each_process():
    assert devices_of() == {"0": "cuda:0", "1": "cuda:1"}


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device")
def test_one_gpu_for_both():
    assert devices_of(CUDA_VISIBLE_DEVICES="0") == {"0": "cuda:0", "1": "cuda:0"}
