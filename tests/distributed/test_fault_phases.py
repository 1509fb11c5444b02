"""Fault by phase: whatever happens in whichever phase of training, every rank says so in time.

Prints a table (pytest -s) of what the ranks reported and after how long. Would catch: a phase in
which a rank waits for one that is gone, or blames another.
"""

import signal

import pytest
from launch import run_job

P, M = 3, 6
BOUND_S = 20.0
# Where the fault happens: (suffix of the fault, step, microbatch).
PHASES = {
    "warm-up of the first step": ("F", 0, 0),
    "warm-up": ("F", 1, 0),
    "steady": ("B", 1, 2),
    "cool-down": ("B", 1, M - 1),
    "between steps": ("between", 1, 0),
}


def plan(fault, rank, step, microbatch):
    return {"mode": "processes", "num_ranks": P, "fault": fault, "rank": rank, "step": step,
            "microbatch": microbatch, "microbatches": M, "options": {"hint": "1f1b", "slack": 0}}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_fault_in_phase(kind, phase):
    point, step, microbatch = PHASES[phase]
    if kind == "raise" and point == "between":
        pytest.skip("an exception between steps is the caller's own")
    victim = 1
    ends, orphans, transcript = run_job(plan(f"{kind}-{point}", victim, step, microbatch))
    (fault,) = [e for end in ends for e in end.events if e["event"] == "fault"]
    told = []
    for rank, end in enumerate(ends):
        if kind == "kill" and rank == victim:
            assert end.exit_code == -signal.SIGKILL, transcript
            told.append("killed")
            continue
        assert end.error and end.exit_code == 1, transcript
        delay_s = end.error["time_s"] - fault["time_s"]
        assert delay_s < BOUND_S, transcript
        expected = {"raise": "StageError", "kill": "PeerLostError"}[kind]
        assert end.error["type"] == expected, transcript
        assert end.error["attributes"]["rank"] == victim, transcript
        assert f"rank {victim}" in end.error["text"], transcript
        told.append(f"{end.error['type']} {delay_s:.2f} s")
    assert not orphans
    print(f"\n{kind:6} {phase:26} {'  '.join(f'{words:22}' for words in told)}")
