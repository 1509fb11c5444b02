"""The promise: whatever the hint, slack, limit, order, timing and process mode, gradients and
losses are those of a plain loop over the microbatches.

Would catch: a gradient lost, added twice or given to the wrong microbatch; losses in the order
of execution; a scale applied twice; an inference forward; a limit overstepped; a deadlock.
"""

import os

import parity_cases
import parity_run
import pytest
from pairwise import all_pairs, pairs_of
from parity_group import WorkerGroup, worker_group

SEED = int(os.environ.get("RRFP_SEED", "20260518"))
CASES = parity_cases.pairwise_cover(SEED, at_least=320)
CHUNK = 150
late_counts = {"late": 0, "reordered": 0}


def run_case(case):
    group = (
        worker_group(1, distributed=False)
        if case.mode == "threads"
        else worker_group(case.num_ranks)
    )
    try:
        answers = group.values(parity_run.run_rank, case)
        for name in late_counts:
            late_counts[name] += sum(answer[name] for answer in answers)
        parity_run.check(case, answers)
    except AssertionError as error:
        raise AssertionError(f"seed {SEED}, {case!r}: {error}") from error


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_plain_loop(case):
    run_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20))
def test_matches_plain_loop_thousands(chunk):
    for case in parity_cases.pairwise_cover(SEED + 1 + chunk, at_least=CHUNK)[:CHUNK]:
        run_case(case)


def test_messages_were_late_and_reordered(capsys):
    """Runs after the cases: the seam really did what its name says."""
    if not any(late_counts.values()):
        pytest.skip("it counts over the parity cases; run the whole file")
    with capsys.disabled():
        print("\nparity: messages {late} late, {reordered} overtaken".format(**late_counts))
    assert late_counts["late"] > 100
    assert late_counts["reordered"] > 10


def test_cover_is_pairwise(capsys):
    """The suite says what it ran, and no pair of settings is missing from it."""
    with capsys.disabled():
        print(f"\nparity: seed {SEED}, {parity_cases.sizes_text(CASES)}")
    seen = set().union(*(pairs_of({n: vars(case)[n] for n in parity_cases.FACTORS})
                         for case in CASES))
    assert not all_pairs(parity_cases.FACTORS, parity_cases.is_allowed) - seen
    assert len(CASES) >= 300


def echo(rank, num_ranks, delay_s):
    import time

    time.sleep(delay_s if rank == num_ranks - 1 else 0.0)
    return rank


def test_watchdog_kills_and_reports():
    """The net itself: a case that hangs is ended, with the stacks of those who did not answer."""
    group = WorkerGroup(2, distributed=False)
    try:
        assert [a.value for a in group.run(echo, 0.0)] == [0, 1]
        with pytest.raises(AssertionError, match=r"watchdog: ranks \[1\](.|\n)*in echo"):
            group.run(echo, 60.0, timeout_s=0.5)
        assert not group.processes
    finally:
        group.kill()


def value_of(rank, num_ranks, name):
    return os.environ.get(name)


def test_a_group_has_the_environment_of_its_start(monkeypatch):
    """Not that of the process it is forked from, which an earlier group has started."""
    assert worker_group(1, False).values(value_of, "RRFP_TEST_OF_A_GROUP") == [None]
    monkeypatch.setenv("RRFP_TEST_OF_A_GROUP", "set later")
    group = WorkerGroup(1, distributed=False)
    group.start()
    try:
        assert group.values(value_of, "RRFP_TEST_OF_A_GROUP") == ["set later"]
    finally:
        group.kill()
