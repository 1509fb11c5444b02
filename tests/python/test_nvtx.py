"""What a profiler sees through NVTX: a range per task, message and wait, and names of threads.

The listener (tests/cpp/nvtx) is brought in as a profiler brings itself in. Would catch: a range
that is not closed or closed on another thread, a message without its size, a name left out.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import rrfp

ROOT = Path(__file__).resolve().parents[2]
NVTX = rrfp.build_info()["nvtx"]
STEPS, MICROBATCHES = 2, 3
PAYLOAD_BYTES = 64  # 2 x 8 floats


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The lines of each rank, split into words."""
    if not NVTX:
        pytest.skip("built without the NVTX headers; pip install nvidia-nvtx brings them")
    folder = tmp_path_factory.mktemp("nvtx")
    listener = folder / "listener.so"
    subprocess.run(
        [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", "-isystem", NVTX,
         str(ROOT / "tests/cpp/nvtx/nvtx_listener.cc"), "-o", str(listener)], check=True,
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/distributed/nvtx_rank.py"), str(rank), str(folder)],
            env={**os.environ, "NVTX_INJECTION64_PATH": str(listener), "OMP_NUM_THREADS": "1",
                 "RRFP_NVTX_LOG": str(folder / f"log{rank}")},
        )
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        [line.split(" ", 2) for line in (folder / f"log{rank}").read_text().splitlines()]
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_range_per_task_and_wait(logs, rank):
    lines = logs[rank]
    assert ["domain", "rrfp"] in lines
    open_ranges, closed = {}, Counter()
    for what, thread, *name in lines:
        if what == "push":
            open_ranges.setdefault(thread, []).append(name[0])
        elif what == "pop":
            assert len(open_ranges[thread]) == 1, "a wait is not inside a task"
            closed[open_ranges[thread].pop()] += 1
    assert not any(open_ranges.values()), f"left open: {open_ranges}"
    waits = {name: closed.pop(name) for name in list(closed) if name.startswith("wait: ")}
    assert closed == {f"{rank}{k}{m}": STEPS for k in "FB" for m in range(MICROBATCHES)}
    assert sum(waits.values()) > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_span_per_message_with_its_size(logs, rank):
    started, ended = {}, set()
    for what, number, *rest in logs[rank]:
        if what == "start":
            started[number] = rest[0].split(" ", 1)
        elif what == "end":
            ended.add(number)
    kind = "FB"[rank]
    sent = Counter((name, int(size)) for size, name in started.values())
    assert sent == {
        (f"{rank}{kind}{m} to stage {1 - rank}", PAYLOAD_BYTES): STEPS for m in range(MICROBATCHES)
    }
    assert ended == set(started)


@pytest.mark.parametrize("rank", [0, 1])
def test_threads_have_names(logs, rank):
    names = {line[2] for line in logs[rank] if line[0] == "thread"}
    assert names == {f"rrfp rank {rank}", "rrfp progress"}
