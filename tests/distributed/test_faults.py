"""Exceptions, dead, absent and slow ranks, with real processes: every rank ends in time, with
an error that names where it began, and no process is left behind.

Would catch: a rank that waits for a dead one, an error without its origin, an interpreter that
hangs at exit, a peer counted as lost because it was slow.
"""

import os
import signal
import time

import pytest
import rank_faults
from launch import Job, run_job

P = 3
BOUND_S = 20.0  # from the fault to the last rank's error, on a busy machine


def plan(fault, **more):
    return {"mode": "processes", "num_ranks": P, "fault": fault, **more}


def errors_of(ends, transcript, kind, skip=()):
    """The errors of all ranks (but ``skip``), each of that type, after checking their time."""
    told = [e for end in ends for e in end.events if e["event"] == "fault"]
    errors = []
    for rank, end in enumerate(ends):
        if rank in skip:
            continue
        assert end.error, f"rank {rank} raised nothing\n{transcript}"
        assert end.error["type"] == kind, f"rank {rank}\n{transcript}"
        if told:
            delay_s = end.error["time_s"] - told[0]["time_s"]
            assert delay_s < BOUND_S, f"rank {rank} heard {delay_s} s late\n{transcript}"
        errors.append(end.error)
    return errors


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize(
    ("kind", "stage"), [(k, s) for k in "FB" for s in range(P)] + [("loss", P - 1)]
)
def test_exception_reaches_every_rank(mode, kind, stage):
    """And afterwards the next step builds anew and trains."""
    ends, orphans, transcript = run_job(plan(f"raise-{kind}", mode=mode, rank=stage, again=True))
    task = f"{stage}{'F' if kind != 'B' else 'B'}2"
    for error in errors_of(ends, transcript, "StageError"):
        assert f"broken on purpose in {kind} of stage {stage}" in error["text"], transcript
        assert "fault_rank.py" in error["text"], "the original traceback is missing"
        assert f"rank {stage}" in error["text"] or error["attributes"].get("rank") == stage
        assert task in error["text"] or kind == "loss", transcript
        assert error["attributes"]["rank"] == stage
        assert error["attributes"]["stage"] == stage
    assert all(end.exit_code == 0 and end.event("done") for end in ends), transcript
    assert not orphans


def test_a_thread_that_ends_while_threads_are_counted(monkeypatch):
    """On a busy machine a joined thread is still listed, and gone when its name is read."""
    listdir = os.listdir

    def with_one_that_ended(path):
        return listdir(path) + (["0"] if path == "/proc/self/task" else [])

    monkeypatch.setattr(os, "listdir", with_one_that_ended)
    assert "threads" in rank_faults.left_over()


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_exit_after_an_error_does_not_hang(mode):
    ends, orphans, transcript = run_job(plan("raise-F", mode=mode, rank=1))
    errors_of(ends, transcript, "StageError")
    assert all(end.exit_code == 1 for end in ends), transcript
    assert not orphans


@pytest.mark.parametrize("rank", range(P))
@pytest.mark.parametrize("fault", ["kill-F", "kill-B", "kill-between"])
def test_killed_rank_is_named(fault, rank):
    ends, orphans, transcript = run_job(plan(fault, rank=rank))
    assert ends[rank].exit_code == -signal.SIGKILL
    for error in errors_of(ends, transcript, "PeerLostError", skip=[rank]):
        assert f"rank {rank}" in error["text"], transcript
    assert all(end.exit_code == 1 for r, end in enumerate(ends) if r != rank), transcript
    assert not orphans


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_before_set_up(rank):
    """Nobody has met yet: the others give up in time and name who did not come."""
    ends, orphans, transcript = run_job(
        plan("kill-between", rank=rank, step=0, stall_timeout_s=4.0)
    )
    for r, end in enumerate(ends):
        if r != rank:
            assert end.error and end.exit_code == 1, transcript
            # Rank 0 holds torch's store, through which the ranks meet.
            expected = "PeerLostError" if rank == 0 else "RankTimeoutError"
            assert end.error["type"] == expected, transcript
            assert f"rank {rank}" in end.error["text"], transcript
    assert not orphans


def test_rank_that_leaves_between_steps():
    """An orderly exit of one rank while the others go on is told to them, by name."""
    ends, _, transcript = run_job(plan("leave-between", rank=2))
    for rank in (0, 1):
        assert ends[rank].error, transcript
        assert "rank 2" in ends[rank].error["text"], transcript


def test_rank_that_never_enters_is_named():
    with Job(plan("absent-between", rank=1, stall_timeout_s=3.0)) as job:
        ends = job.finish(ranks=[0, 2])
        for end in ends:
            assert end.error, job.transcript()
            assert "rank 1" in end.error["text"], job.transcript()
            assert end.exit_code == 1


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_stall_says_who_waits_for_what(mode):
    """A message that never comes: nobody can go on, nobody is dead."""
    ends, orphans, transcript = run_job(
        plan("drop", mode=mode, rank=1, stall_timeout_s=2.0, again=True)
    )
    for error in errors_of(ends, transcript, "StallError"):
        assert "2F2" in error["text"], transcript
        assert "stage 1" in error["text"] or "rank 1" in error["text"], transcript
        ranks = error["report"]["ranks"]
        assert [entry["rank"] for entry in ranks] == [0, 1, 2]
        for entry in ranks:
            line = f"\nRank {entry['rank']}: step 0: {entry['rank']}F0 "
            assert line in error["text"], transcript
            assert entry["activity"] == "waiting" and len(entry["decisions"]) > 8, transcript
        lacking = ranks[2]
        assert (lacking["task"], lacking["blocked_by"]) == ("2F2", "input"), transcript
        assert (lacking["lacks_stage"], lacking["lacks_rank"]) == (1, 1), transcript
        assert lacking["decisions"][-1]["because"] == "lacks stage 1", transcript
    assert all(end.event("done") and end.exit_code == 0 for end in ends), transcript
    assert not orphans


def test_long_task_is_no_stall():
    """A task longer than the stall time-out is busy, not stalled."""
    ends, _, transcript = run_job(plan("long-F", rank=1, long_s=4.0, stall_timeout_s=1.2))
    assert all(end.event("done") and end.exit_code == 0 for end in ends), transcript


def test_stopped_process_is_survived():
    with Job(plan("none", task_s=0.02, steps=6)) as job:
        job.wait_for(1, "step")
        job.wait_for(0, "step")
        time.sleep(0.2)
        job.send(1, signal.SIGSTOP)
        time.sleep(1.0)
        job.send(1, signal.SIGCONT)
        ends = job.finish()
        assert all(end.event("done") and end.exit_code == 0 for end in ends), job.transcript()


@pytest.mark.parametrize("fault", ["exit-F", "exit-B"])
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_system_exit_in_a_stage(mode, fault):
    """sys.exit() inside a stage ends all ranks, not only its own."""
    ends, orphans, transcript = run_job(plan(fault, mode=mode, rank=1))
    assert all(end.exit_code != 0 for end in ends), transcript
    assert not orphans


@pytest.mark.parametrize("victim", ["one", "all"])
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_interrupt_ends_everything(mode, victim):
    """Ctrl-C in the middle of a step: all processes end, the first one by its KeyboardInterrupt
    (the others may hear of it before their own signal comes)."""
    with Job(plan("none", mode=mode, rank=0, task_s=0.1, steps=100)) as job:
        job.wait_for(0, "in step")
        told = range(job.count) if victim == "all" else [0]
        for rank in told:
            job.send(rank, signal.SIGINT)
        ends = job.finish(BOUND_S)
        assert ends[0].event("interrupted"), job.transcript()
        assert all(end.exit_code != 0 for end in ends), job.transcript()
        assert not job.orphans()


def test_terminate_ends_everything():
    with Job(plan("none", rank=0, task_s=0.1, steps=100)) as job:
        job.wait_for(0, "in step")
        job.send(1, signal.SIGTERM)
        ends = job.finish(BOUND_S)
        assert all(end.exit_code != 0 for end in ends), job.transcript()
        for rank in (0, 2):
            assert "rank 1" in ends[rank].error["text"], job.transcript()


def test_forked_child_does_not_keep_a_dead_rank_alive():
    """The child of a killed rank lives on, but must not hold its connections open."""
    with Job(plan("fork-kill", rank=1)) as job:
        ends = job.finish(BOUND_S + 20)
        transcript = job.transcript()
        for error in errors_of(ends, transcript, "PeerLostError", skip=[1]):
            assert "rank 1" in error["text"], transcript
        assert job.orphans() == [1], "the child should have been alive all the time"


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_forked_child_is_refused(mode):
    ends, _, transcript = run_job(plan("fork-use", mode=mode, rank=0))
    assert ends[0].event("child")["code"] == 7, transcript
    assert "fork" in ends[0].event("child refused")["text"]
    assert all(end.event("done") and end.exit_code == 0 for end in ends), transcript


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_data_loader_workers(mode):
    """Loader workers forked after the set-up neither hang nor disturb the step."""
    ends, orphans, transcript = run_job(plan("loader", mode=mode, steps=3))
    assert all(end.event("done") and end.exit_code == 0 for end in ends), transcript
    assert not orphans
