"""Ranks that do not do the same: one sets up a pipeline while others wait in a step, or comes late.

Would catch: a wait for the whole time-out, words that blame the wrong rank, an error on one rank
alone, and ranks that stay a call apart afterwards: the next call of all must work.
"""

import signal
import time

import parity_model as model
import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp import _C, set_up_watch

M, WIDTH = 4, 4
TIMEOUT_S = 24.0


def make_stage(index, seed=1, **options):
    torch.manual_seed(seed + index)
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64, **options)


def batch():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(M)]


def arguments_of(rank, num_ranks):
    return (batch() if rank == 0 else None, batch() if rank == num_ranks - 1 else None,
            nn.functional.mse_loss)


def plain_gradients(num_ranks):
    stages = [make_stage(index) for index in range(num_ranks)]
    for value in batch():
        target = value
        for stage in stages:
            value = stage(value)
        (nn.functional.mse_loss(value, target) / M).backward()
    return [stage.weight.grad for stage in stages]


def outcome(call, *args, **options):
    """(name of the error or "", its text, seconds)."""
    began = time.monotonic()
    try:
        call(*args, **options)
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def run_parting(rank, num_ranks, parting, how):
    """What the calls said, and the gradient of a last call that all make alike."""
    stage, arguments = make_stage(rank), arguments_of(rank, num_ranks)
    said = [outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=60.0)]
    other = stage
    if rank == parting:
        other = make_stage(rank, 7, device="meta") if how == "meta" else make_stage(rank, 7)
    call = rrfp.run_pipeline
    if rank == parting and how == "pipeline":
        call = lambda s, *_, stall_timeout_s: rrfp.Pipeline(  # noqa: E731
            s, set_up_timeout_s=stall_timeout_s)
    # The second time no old pipeline is there: all set up, and what is wrong is said.
    for _ in range(2 if how == "meta" else 1):
        said.append(outcome(call, other, *arguments, stall_timeout_s=TIMEOUT_S))
    stage.zero_grad()
    said.append(outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=60.0))
    return said, stage.weight.grad.numpy()


@pytest.mark.parametrize(
    ("how", "parting"),
    [("module", 0), ("module", 1), ("module", 2), ("meta", 1), ("pipeline", 0), ("pipeline", 1)],
)
def test_a_rank_that_sets_up_instead_of_a_step(how, parting):
    answers = worker_group(3).values(run_parting, parting, how)
    first, parted, *others, last = zip(*[said for said, _ in answers], strict=True)
    assert {name for name, _, _ in (*first, *last)} == {""}, (first, last)
    assert {name for name, _, _ in parted} == {"RanksParted"}, parted
    texts = {text for _, text, _ in parted}
    assert len(texts) == 1 and f"rank {parting} sets up a pipeline while rank" in texts.pop()
    assert all(seconds < TIMEOUT_S / 2 for _, _, seconds in parted), parted
    for again in others:
        assert {name for name, _, _ in again} == {"ValueError"}, again
    for (_, gradient), want in zip(answers, plain_gradients(3), strict=True):
        assert model.gradient_error(torch.as_tensor(gradient), want) <= 1e-10


def run_late(rank, num_ranks):
    stage, arguments = make_stage(rank), arguments_of(rank, num_ranks)
    said = []
    if rank == 1:
        time.sleep(3.0)
    else:
        said.append(outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=1.0))
    said.append(outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=60.0))
    return said, stage.weight.grad.numpy()


def test_a_late_rank_joins_the_others_in_their_next_attempt():
    answers = worker_group(3).values(run_late)
    for rank, (said, _) in enumerate(answers):
        if rank != 1:
            name, text, _ = said[0]
            assert name == "RankTimeoutError", said
            assert "rank 1 (global rank 1) did not join the pipeline within 1 s" in text, said
        assert said[-1][0] == "", (rank, said)
    for (_, gradient), want in zip(answers, plain_gradients(3), strict=True):
        assert model.gradient_error(torch.as_tensor(gradient), want) <= 1e-10


def run_too_late(rank, num_ranks):
    stage, arguments = make_stage(rank), arguments_of(rank, num_ranks)
    if rank == 1:
        torch.distributed.barrier()
    patience_s = 60.0 if rank == 1 else 1.0
    said = [outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=patience_s)]
    if rank != 1:
        torch.distributed.barrier()
    return said + retry(stage, arguments), stage.weight.grad.numpy()


def retry(stage, arguments, most=2):
    """What attempts behind barriers say, up to the one that works; ``most`` of them may be made."""
    said = []
    while len(said) < most and (not said or said[-1][0]):
        torch.distributed.barrier()
        stage.zero_grad()
        said.append(outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=20.0))
    return said


def test_a_rank_that_comes_when_the_others_have_given_up():
    answers = worker_group(3).values(run_too_late)
    first = [said[0] for said, _ in answers]
    assert {name for name, _, _ in first} == {"RankTimeoutError"}, first
    assert all("rank 1 (global rank 1) did not join" in text for _, text, _ in first), first
    assert "this set-up has been given up" in first[1][1] and first[1][2] < 30.0, first
    check_retries(answers)


def check_retries(answers, num_ranks=3):
    """All were together in their last attempt, and its gradients are those of a plain loop."""
    lasts = [said[-1] for said, _ in answers]
    assert {name for name, _, _ in lasts} == {""}, answers
    for (_, gradient), want in zip(answers, plain_gradients(num_ranks), strict=True):
        assert model.gradient_error(torch.as_tensor(gradient), want) <= 1e-10


def run_one_attempt_apart(rank, num_ranks):
    """A rank's set-up is over before the others' step is; from then on all set up the same."""
    stage, arguments = make_stage(rank), arguments_of(rank, num_ranks)
    with rrfp.Pipeline(make_stage(rank)) as pipeline:
        said = [outcome(pipeline.step, *arguments, stall_timeout_s=60.0)]
        if rank == 0:
            said.append(outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=0.5))
        else:
            said.append(outcome(pipeline.step, *arguments, stall_timeout_s=3.0))
    return said + retry(stage, arguments), stage.weight.grad.numpy()


def test_ranks_one_attempt_apart_meet_again():
    answers = worker_group(3).values(run_one_attempt_apart)
    assert {said[0][0] for said, _ in answers} == {""}, answers
    assert "" not in {said[1][0] for said, _ in answers}, answers
    check_retries(answers)


def run_interrupted(rank, num_ranks):
    """One rank is interrupted in a set-up that another has not come to; then all try again."""
    stage, arguments = make_stage(rank), arguments_of(rank, num_ranks)
    said = []
    if rank == 1:

        def interrupt(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        try:
            said.append(outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=60.0))
        finally:
            signal.signal(signal.SIGALRM, before)
    elif rank == 0:
        said.append(outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=60.0))
    return said + retry(stage, arguments), stage.weight.grad.numpy()


def test_an_interrupted_set_up_is_told_to_those_who_wait():
    answers = worker_group(3).values(run_interrupted)
    (told, *_), (interrupted, *_) = answers[0][0], answers[1][0]
    assert interrupted[0] == "KeyboardInterrupt", answers
    assert told[0] == "RankTimeoutError" and told[2] < 30.0, answers
    assert "given up: rank 1 left it with KeyboardInterrupt" in told[1], answers
    check_retries(answers)


def run_interrupted_while_connecting(rank, num_ranks):
    """All have met in the store; one is interrupted before the others reach it."""
    stage, arguments = make_stage(rank), arguments_of(rank, num_ranks)
    connect = _C.connect_control
    if rank == 1:

        def interrupted(*_):
            raise KeyboardInterrupt

        _C.connect_control = interrupted
    try:
        said = [outcome(rrfp.run_pipeline, stage, *arguments, stall_timeout_s=60.0)]
    finally:
        _C.connect_control = connect
    return said + retry(stage, arguments), stage.weight.grad.numpy()


def test_so_is_one_that_is_interrupted_while_the_others_connect():
    answers = worker_group(3).values(run_interrupted_while_connecting)
    assert answers[1][0][0][0] == "KeyboardInterrupt", answers
    for rank in (0, 2):
        name, text, after_s = answers[rank][0][0]
        assert name == "RankTimeoutError" and after_s < 30.0, answers
        assert "given up: rank 1 left it with KeyboardInterrupt" in text, answers
    check_retries(answers)


def run_alternating(rank, num_ranks):
    """Two pipelines of the same ranks in turn; one rank is slow between them."""
    stages, arguments = [make_stage(rank), make_stage(rank, 5)], arguments_of(rank, num_ranks)
    said = []
    for step in range(6):
        if rank == step % num_ranks:
            time.sleep(0.7)
        said.append(outcome(rrfp.run_pipeline, stages[step % 2], *arguments, stall_timeout_s=2.4))
    return said


def test_two_pipelines_in_turn_are_no_parting():
    for said in worker_group(3).values(run_alternating):
        assert [name for name, _, _ in said] == [""] * 6, said


def run_and_dump(rank, num_ranks):
    with rrfp.Pipeline(make_stage(rank)) as pipeline:
        pipeline.step(*arguments_of(rank, num_ranks), stall_timeout_s=60.0)
        return pipeline.dump()


def test_after_a_step_a_rank_is_outside_one():
    for rank, text in enumerate(worker_group(3).values(run_and_dump)):
        assert f"Rank {rank} is outside a step, after step 0" in text, text


def step_without_looks(rank, num_ranks):
    """A step whose second rank comes late, to a first that gets no thread to look for it."""
    looked = []

    def refuse(*_):
        looked.append(rank)
        raise RuntimeError("can't start new thread")

    with (rrfp.Pipeline({rank: make_stage(rank)}) as pipeline,
          pytest.MonkeyPatch.context() as patched):
        patched.setattr(set_up_watch, "_Look", refuse)
        torch.distributed.barrier()
        if rank == 1:
            time.sleep(3 * set_up_watch._LOOK_EVERY_S)
        pipeline.step(*arguments_of(rank, num_ranks), stall_timeout_s=TIMEOUT_S)
    return looked


def test_who_gets_no_thread_to_look_for_a_rank_waits_for_it():
    looked, _ = worker_group(2).values(step_without_looks)
    assert looked
