"""The ways to start a job that docs/multi_node.md shows, with this machine as every host.

Would catch: a command of that page that does not start a job any more.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/multi_node.md"


@pytest.fixture
def job(tmp_path):
    """(folder with train.py and the programs it is started with, environment, a free port)."""
    (tmp_path / "train.py").symlink_to(ROOT / "tests/distributed/host_rank.py")
    for name, body in (
        ("scontrol", "echo 127.0.0.1; echo elsewhere"),
        ("srun", 'for p in 0 1; do SLURM_PROCID=$p SLURM_NTASKS=2 "$@" & done; wait'),
        ("python", f'exec {sys.executable} "$@"'),
        ("torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                   "MASTER_ADDR": "127.0.0.1", "FIRST_HOST": "127.0.0.1"}
    return tmp_path, environment, str(free_port())


def block(word):
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [body for body in blocks if word in body]
    return found


def ranks_of(scripts, job):
    """Run the scripts at once; the ranks that reported steps equal to a plain loop's."""
    folder, environment, port = job
    processes = [
        subprocess.Popen(["sh", "-c", script.replace("29500", port)], cwd=folder, text=True,
                         env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for script in scripts
    ]
    ends = [process.communicate(timeout=200) for process in processes]
    ranks = re.findall(r'\[\{"rank": (\d+)', "".join(out for out, _ in ends))
    assert ranks, "".join(errors for _, errors in ends)
    return sorted(map(int, ranks))


def test_slurm(job):
    assert ranks_of([block("srun")], job) == [0, 1]


def test_plain_environment(job):
    assert ranks_of(block("FIRST_HOST").splitlines(), job) == [0, 1]


@pytest.mark.slow
def test_torchrun(job):
    assert ranks_of([block("torchrun")] * 2, job) == [0, 1, 2, 3]
