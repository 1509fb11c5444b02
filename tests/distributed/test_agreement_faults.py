"""Agreement groups that cannot be, members that disagree, fail or die."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rrfp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from parity_group import WorkerGroup, worker_group  # noqa: E402
from skewed_members import mesh_of  # noqa: E402

NUM_RANKS = 4


def run_refused(rank, num_ranks, case):
    """What a wrong call raises, and that the next one works."""
    mesh = mesh_of(num_ranks)
    stage, member = mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()
    module = torch.nn.Linear(1, 1)
    pipeline = rrfp.Pipeline({stage: module}, group=mesh, agreement_group="auto")

    def step(num_microbatches=2, **options):
        inputs = [torch.ones(1, 1)] * num_microbatches
        pipeline.step(
            inputs if stage == 0 else None,
            inputs if stage == 1 else None,
            torch.nn.functional.mse_loss if stage == 1 else None,
            **options,
        )

    wrong = {
        "limit": {"max_in_flight": 2 + member},
        "microbatches": {"num_microbatches": 2 + member},
        "one refuses": {"max_in_flight": 0 if member else 2},
        "grad_scale": {"grad_scale": 1.0 + member},
        "seed": {"seed": member},
    }[case]
    with pipeline:
        step()
        try:
            step(**wrong)
            text = None
        except ValueError as error:
            text = str(error)
        step()
    return text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("limit", "disagree on limits: member 0 has (2, 2), member 1 has (3, 3)"),
        ("microbatches", "disagree on num_microbatches: member 0 has 2, member 1 has 3"),
        ("one refuses", "must be at least 1"),
        ("grad_scale", "disagree on grad_scale: member 0 has 1.0, member 1 has 2.0"),
        ("seed", "disagree on seed: member 0 has 0, member 1 has 1"),
    ],
)
def test_members_that_disagree_are_refused_everywhere_and_live_on(case, words):
    texts = worker_group(NUM_RANKS).values(run_refused, case)
    assert all(text is not None and words in text for text in texts), texts


def run_bad_set_up(rank, num_ranks, case):
    mesh = mesh_of(num_ranks)
    stage = mesh["pp"].get_local_rank()
    crosswise = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    arguments = {
        "own pipeline": {"group": mesh, "agreement_group": mesh["pp"]},
        "other stages": {"group": mesh, "agreement_group": crosswise[rank in (1, 2)]},
        "no mesh": {"group": mesh["pp"].get_group(), "agreement_group": "auto"},
        "not one": {"group": mesh, "agreement_group": 3},
        "some without": {"group": mesh, "agreement_group": "auto" if stage else None},
        "one is wrong": {"group": mesh, "agreement_group": crosswise[0] if rank == 0 else "auto"},
        "one is wrong, last": {
            "group": mesh, "agreement_group": crosswise[1] if rank == 2 else "auto"
        },
        "one is larger": {
            "group": mesh, "agreement_group": dist.group.WORLD if rank == 1 else "auto"
        },
    }[case]
    try:
        # Waiting this long would end the test.
        rrfp.Pipeline({stage: torch.nn.Linear(1, 1)}, set_up_timeout_s=600.0, **arguments)
    except (TypeError, ValueError) as error:
        text = str(error)
    else:
        return None
    dist.barrier()  # docs/errors.md: before a retry where a group was named wrongly
    # As if nothing had been: neither these groups nor pipelines of other ranks are out of step.
    rrfp.Pipeline({stage: torch.nn.Linear(1, 1)}, group=mesh, agreement_group="auto").close()
    rrfp.Pipeline({rank: torch.nn.Linear(1, 1)}, set_up_timeout_s=60.0).close()
    return text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("own pipeline", "members of an agreement group are in different pipelines"),
        ("other stages", "different stages"),
        ("no mesh", "reads a DeviceMesh"),
        ("not one", "agreement_group is a int"),
        ("some without", "agreement groups"),
        ("one is wrong", "the ranks disagree on agreement_group"),
        ("one is wrong, last", "the ranks disagree on agreement_group"),
        ("one is larger", "agreement"),
    ],
)
def test_groups_that_cannot_be_are_refused_by_name(case, words):
    texts = worker_group(NUM_RANKS).values(run_bad_set_up, case)
    assert all(text is not None and words in text for text in texts), texts


class Holding(torch.nn.Linear):
    def __init__(self, group):
        super().__init__(1, 1)
        self.group = group


def sharded_stage(mesh, what):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if what == "dtensor":
        return parallelize_module(torch.nn.Linear(2, 2), mesh["tp"], ColwiseParallel())
    if what == "fsdp":
        return torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh["tp"])
    return Holding(mesh["tp"].get_group() if what == "group" else mesh["pp"].get_group())


def run_without_a_group(rank, num_ranks, what):
    """What a pipeline says whose second stage meets others in its tasks, and none whose says no."""
    mesh = mesh_of(num_ranks)
    stage = mesh["pp"].get_local_rank()
    module = sharded_stage(mesh, what) if stage == 1 else torch.nn.Linear(2, 2)
    texts = []
    for agreement_group in (None, mesh["tp"].get_group(), "none"):
        try:
            rrfp.Pipeline({stage: module}, group=mesh, agreement_group=agreement_group).close()
            texts.append(None)
        except ValueError as error:
            texts.append(str(error))
    try:
        rrfp.Pipeline([module, torch.nn.Linear(2, 2)]).close()
        texts.append(None)
    except ValueError as error:
        texts.append(str(error))
    return stage, texts


@pytest.mark.parametrize("what", ["dtensor", "fsdp", "group", "own pipeline's group"])
def test_stages_that_meet_others_without_a_group_are_refused(what):
    for stage, texts in worker_group(NUM_RANKS).values(run_without_a_group, what):
        alone, agreed, says_none, in_one_process = texts
        assert agreed is None and says_none is None
        if what == "own pipeline's group":
            assert alone is None
            continue
        assert "stage 1 meets other ranks in collectives" in alone
        assert 'pass them as agreement_group ("auto" with a DeviceMesh' in alone
        if stage == 1:
            assert "run one process per rank" in in_one_process


def test_one_process_is_refused():
    with pytest.raises(ValueError, match="torch.distributed is not initialised"):
        rrfp.Pipeline([torch.nn.Linear(1, 1)], agreement_group="auto")


def run_interrupted_set_up(rank, num_ranks):
    """Rank 1 is interrupted while rank 3 has not come; then all try again behind barriers."""
    mesh = mesh_of(num_ranks)
    module = torch.nn.Linear(1, 1)

    def set_up(timeout_s):
        began_s = time.monotonic()
        try:
            rrfp.Pipeline({mesh["pp"].get_local_rank(): module}, group=mesh,
                          agreement_group="auto", set_up_timeout_s=timeout_s).close()
        except (rrfp.RankTimeoutError, KeyboardInterrupt) as error:
            return type(error).__name__, str(error), time.monotonic() - began_s
        return "", "", time.monotonic() - began_s

    def interrupt(*_):
        raise KeyboardInterrupt

    if rank == 1:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    # Rank 2 alone is told by time that its member, rank 3, does not come.
    said = [None if rank == 3 else set_up(6.0 if rank == 2 else 60.0)]
    if rank == 1:
        signal.signal(signal.SIGALRM, before)
    while len(said) < 2 or (said[-1][0] and len(said) < 3):
        dist.barrier()
        said.append(set_up(20.0))
    return said


def test_a_member_that_leaves_its_set_up_is_named_and_all_meet_again():
    answers = worker_group(NUM_RANKS).values(run_interrupted_set_up)
    assert answers[1][0][0] == "KeyboardInterrupt", answers
    for rank in (0, 2):
        name, text, seconds = answers[rank][0]
        assert name == "RankTimeoutError" and seconds < 30.0, answers
        assert "given up: rank 1 left it with KeyboardInterrupt" in text, answers
    assert {said[-1][0] for said in answers} == {""}, answers


def fail_in_one_pipeline(rank, num_ranks, how):
    """One member fails in a stage or dies; what each of the others gets."""
    mesh = mesh_of(num_ranks)
    stage, member = mesh["pp"].get_local_rank(), mesh["tp"].get_local_rank()

    class Failing(torch.nn.Linear):
        def forward(self, value):
            if stage == 1 and member == 1:
                if how == "dies":
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError("no")
            return super().forward(value)

    pipeline = rrfp.Pipeline({stage: Failing(1, 1)}, group=mesh, agreement_group="auto")
    inputs = [torch.ones(1, 1)] * 4
    try:
        pipeline.step(
            inputs if stage == 0 else None,
            inputs if stage == 1 else None,
            torch.nn.functional.mse_loss if stage == 1 else None,
        )
    except rrfp.RrfpError as error:
        return type(error).__name__, str(error)
    return None


def test_a_failing_stage_ends_every_pipeline_with_its_words():
    answers = worker_group(NUM_RANKS).values(fail_in_one_pipeline, "raises")
    for kind, text in answers:
        assert kind == "StageError" and "1F0" in text and "ArithmeticError: no" in text


def test_a_killed_member_is_named_in_every_pipeline():
    group = WorkerGroup(NUM_RANKS)
    group.start()
    try:
        for connection in group.connections:
            connection.send((fail_in_one_pipeline, ("dies",)))
        for rank in range(NUM_RANKS - 1):  # the last one is dead
            assert group.connections[rank].poll(60), f"rank {rank} said nothing"
            kind, text = group.connections[rank].recv().value
            assert kind == "PeerLostError", (rank, kind, text)
        assert not [name for name in os.listdir("/dev/shm") if "rrfp" in name]
    finally:
        group.kill()
