"""Stages that move to another device between steps: refused by name on every rank, or the pipeline
is built anew; without a GPU the other device is torch's "meta", or a pretended one.

Would catch: a rank that runs on while another refuses, messages that go on between the devices of
the set-up, a cached pipeline that nobody can be rid of, random numbers that begin again.
"""

import parity_model as model
import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp
from rrfp import session as session_module

MODES = pytest.mark.parametrize("mode", ["threads", "processes"])
NUM_GPUS = torch.cuda.device_count()
P, M, WIDTH, SEED = 3, 4, 4, 7


def make_stages(index=None):
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Dropout(0.3))
              for _ in range(P)]
    return stages if index is None else {index: stages[index]}


def batch():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(M)]


def arguments_of(place):
    """(microbatches, targets, loss function) of a rank; place None: of all."""
    return (batch() if place in (None, 0) else None, batch() if place in (None, P - 1) else None,
            nn.functional.mse_loss)


def plain_gradients(steps):
    """By stage, after those steps, as random numbers count them."""
    stages = make_stages()
    for step in steps:
        for m, value in enumerate(batch()):
            target = value
            for index, stage in enumerate(stages):
                with rrfp.task_rng(SEED, step, index, m):
                    value = stage(value)
            (nn.functional.mse_loss(value, target) / M).backward()
    return [[p.grad for p in stage.parameters()] for stage in stages]


def gradients_of(stages):
    table = stages if isinstance(stages, dict) else dict(enumerate(stages))
    return {s: [p.grad.numpy() for p in stage.parameters()] for s, stage in table.items()}


def check_gradients(answers, steps):
    want = plain_gradients(steps)
    found = {s: of_stage for answer in answers for s, of_stage in answer.items()}
    assert sorted(found) == list(range(P))
    for stage, gradients in found.items():
        for got, expected in zip(gradients, want[stage], strict=True):
            assert model.gradient_error(got, expected) <= 1e-10, f"stage {stage}"


def error_of(call, *args, **options):
    try:
        call(*args, seed=SEED, stall_timeout_s=60.0, **options)
    except ValueError as error:
        return str(error)
    return None


def run_away_and_back(rank, num_ranks, mode):
    """(texts of what the pipeline and run_pipeline say while stage 1 is away, gradients after)."""
    place = None if mode == "threads" else rank
    stages, arguments = make_stages(place), arguments_of(place)
    moving = stages[1] if place in (None, 1) else None
    texts = []
    with rrfp.Pipeline(stages) as pipeline:
        for call in (pipeline.step, lambda *a, **o: rrfp.run_pipeline(stages, *a, **o)):
            texts.append(error_of(call, *arguments))
            kept = moving and {name: t.clone() for name, t in moving.state_dict().items()}
            if moving:
                moving.to("meta")
            texts.append(error_of(call, *arguments))
            if moving:
                moving.to_empty(device="cpu").load_state_dict(kept)
                moving.zero_grad()
            if not isinstance(stages, dict) or rank != 1:
                for stage in stages if place is None else stages.values():
                    stage.zero_grad()
            pipeline.load_state_dict({"step": 0})
            texts.append(error_of(call, *arguments))
    return texts, gradients_of(stages)


@MODES
def test_away_is_refused_and_back_is_fine(mode):
    group = worker_group(1, False) if mode == "threads" else worker_group(P)
    answers = group.values(run_away_and_back, mode)
    first, *others = [texts for texts, _ in answers]
    assert all(texts == first for texts in others), "ranks say different things"
    assert [first[at] for at in (0, 2, 3, 5)] == [None] * 4
    assert "stage 1 was on cpu when this pipeline was set up and is on meta now" in first[1]
    assert "stages run on the CPU and on CUDA devices" in first[4]  # the new set-up's own words
    check_gradients([gradients for _, gradients in answers], [0])


def run_pretended(rank, num_ranks, mode):
    """Three steps; before the second, stage 1 is said to have moved. (sessions, gradients)."""
    place = None if mode == "threads" else rank
    stages, arguments = make_stages(place), arguments_of(place)
    told, look = [], session_module.moved_stages

    def pretend(modules, devices):
        found = look(modules, devices)
        if step == 1 and 1 in modules and not told:
            told.append(1)
            found = [(1, "cuda:0", "cpu")]
        return found

    session_module.moved_stages = pretend
    before = set(session_module._open_sessions)
    sessions = []
    try:
        for step in range(3):
            rrfp.run_pipeline(stages, *map(lambda x: x if callable(x) or x is None else iter(x),
                                           arguments), num_microbatches=M, seed=SEED,
                              stall_timeout_s=60.0)
            sessions.append([id(s) for s in session_module._open_sessions if s not in before])
    finally:
        session_module.moved_stages = look
    return sessions, gradients_of(stages)


@MODES
def test_run_pipeline_builds_anew_and_goes_on(mode):
    """With iterators, which can be drawn only once, and with the masks of the steps to come."""
    group = worker_group(1, False) if mode == "threads" else worker_group(P)
    answers = group.values(run_pretended, mode)
    for sessions, _ in answers:
        first, second, third = sessions
        assert len(first) == len(second) == len(third) == 1
        assert first != second and second == third
    check_gradients([gradients for _, gradients in answers], [0, 1, 2])


def evaluated_stages():
    """Without dropout, which ranks of one process refuse on one GPU; a plain loop's gradients."""
    stages = [stage.eval() for stage in make_stages()]
    expected = [stage.eval() for stage in make_stages()]
    for x in batch():
        value = x
        for stage in expected:
            value = stage(value)
        (nn.functional.mse_loss(value, x) / M).backward()
    return stages, [[p.grad for p in stage.parameters()] for stage in expected]


def check_on(stages, expected, devices):
    for stage, wanted, device in zip(stages, expected, devices, strict=True):
        for p, gradient in zip(stage.parameters(), wanted, strict=True):
            assert p.grad.device == torch.device(device)
            assert model.gradient_error(p.grad.cpu().numpy(), gradient) <= 1e-10


def run_on(stages, devices):
    for stage, device in zip(stages, devices, strict=True):
        stage.to(device).zero_grad()
    rrfp.run_pipeline(stages, [x.to(devices[0]) for x in batch()],
                      [x.to(devices[-1]) for x in batch()], nn.functional.mse_loss,
                      stall_timeout_s=60.0)


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")
def test_a_model_that_moves_to_the_gpu_and_back():
    stages, expected = evaluated_stages()
    for place in ("cpu", "cuda:0", "cpu"):
        run_on(stages, [place] * P)
        check_on(stages, expected, [place] * P)


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")
def test_a_stage_left_behind_is_named():
    stages, expected = evaluated_stages()
    for stage in stages:
        stage.cuda()
    inputs, targets = ([x.cuda() for x in batch()] for _ in range(2))
    with rrfp.Pipeline(stages) as pipeline:
        stages[1].cpu()
        with pytest.raises(ValueError, match="stage 1 was on cuda:0 .* and is on cpu now"):
            pipeline.step(inputs, targets, nn.functional.mse_loss)
        stages[1].cuda()
        pipeline.step(inputs, targets, nn.functional.mse_loss, stall_timeout_s=60.0)
    check_on(stages, expected, ["cuda:0"] * P)


@pytest.mark.multigpu
@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
def test_a_stage_that_moves_between_gpus():
    stages, expected = evaluated_stages()
    for numbers in ((0, 0, 0), (0, 1, 0), (1, 1, 0)):
        devices = [f"cuda:{number}" for number in numbers]
        run_on(stages, devices)
        check_on(stages, expected, devices)
