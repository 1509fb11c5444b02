"""Wrong arguments are refused before any task runs, in words that name the values, with the
same message on every rank; afterwards the same stages train as if nothing had been.

Would catch: a check that only one rank makes (the others hang), a task run before the refusal,
a pipeline that stays broken after a typing error.
"""

import parity_bad
import parity_bad_kinds
import parity_model as model
import pytest
import torch
from parity_group import describe, worker_group

import rrfp

MODES = ["threads", "processes"]
BAD = {**parity_bad.BAD, **parity_bad_kinds.BAD}


def call_twice(rank, num_ranks, mode, name):
    """The bad call, then the good one with the same modules: (error, calls, gradients)."""
    place = None if mode == "threads" else rank
    stages, good = parity_bad.good_call(place)
    bad = {**good, **BAD[name].arguments(place)}
    error = None
    try:
        rrfp.run_pipeline(**bad)
    except Exception as caught:
        error = describe(caught)
    calls = sum(stage.calls for stage in stages)
    rrfp.run_pipeline(**good)
    gradients = {
        f"{s}.{n}": p.grad.numpy()
        for s, stage in enumerate(stages)
        for n, p in stage.named_parameters()
        if p.grad is not None
    }
    return error, calls, gradients


def reference():
    stages, good = parity_bad.good_call(None)
    factors = [1 / parity_bad.NUM_MICROBATCHES] * parity_bad.NUM_MICROBATCHES
    model.plain_loop(stages, good["microbatches"], good["targets"], model.squared_error, factors)
    return {f"{s}.{n}": p.grad for s, m in enumerate(stages) for n, p in m.named_parameters()}


def cases(mode):
    return [n for n, bad in BAD.items() if bad.where in ("both", mode)]


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode in MODES for name in cases(mode)])
def test_refused(mode, name):
    bad = BAD[name]
    group = worker_group(1, False) if mode == "threads" else worker_group(parity_bad.NUM_RANKS)
    answers = group.values(call_twice, mode, name)
    errors = [error for error, _, _ in answers]
    assert all(errors), f"accepted on ranks {[r for r, e in enumerate(errors) if not e]}"
    assert {e.error_text for e in errors} == {errors[0].error_text}, "ranks say different things"
    assert bad.error in errors[0].error_bases, errors[0].error_traceback
    for word in bad.words:
        assert word in errors[0].error_text, f"no {word!r} in: {errors[0].error_text}"
    assert sum(calls for _, calls, _ in answers) == 0, "a task ran before the refusal"
    gradients = {k: g for _, _, part in answers for k, g in part.items()}
    for key, expected in reference().items():
        assert model.gradient_error(gradients[key], expected) <= 1e-10, key


def run_losses(rank, num_ranks, mode, kind):
    """A loss that only shows what is wrong with it when it is computed, or before."""
    place = None if mode == "threads" else rank
    stages, good = parity_bad.good_call(place)
    losses = {
        "vector": lambda output, target: (output[0] - target).square(),
        "number": lambda output, target: 1.0,
        "none": lambda output, target: None,
        "detached": lambda output, target: model.squared_error(output, target).detach(),
        "integer": lambda output, target: torch.tensor(3),
        "complex": lambda output, target: model.squared_error(output, target) * (1 + 1j),
    }
    good["loss_fn"] = losses.get(kind, model.squared_error)
    if kind == "frozen":
        for stage in stages:
            stage.requires_grad_(False)
    try:
        with torch.set_grad_enabled(kind != "no_grad"):
            rrfp.run_pipeline(**good)
    except Exception as caught:
        return describe(caught), sum(stage.calls for stage in stages)
    return None, 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vector", ["loss", "scalar"]),
        ("number", ["loss", "float"]),
        ("none", ["loss", "None"]),
        ("detached", ["loss", "grad"]),
        ("integer", ["loss"]),
        ("complex", ["complex loss", ".real"]),
        ("frozen", ["loss", "grad"]),
        ("no_grad", ["no_grad", "forward_only"]),
    ],
)
def test_unusable_loss(mode, kind, words):
    """The same error on every rank; under no_grad before anything has run."""
    group = worker_group(1, False) if mode == "threads" else worker_group(parity_bad.NUM_RANKS)
    answers = group.values(run_losses, mode, kind)
    for error, calls in answers:
        assert error is not None
        for word in words:
            assert word in error.error_text, f"no {word!r} in: {error.error_text}"
        if kind == "no_grad":
            assert calls == 0
            assert error.error_type == "ValueError"
    if kind == "no_grad":
        assert len({error.error_text for error, _ in answers}) == 1


class StaticStage(model.RecordingStage):
    """Copies every output into one tensor, as a CUDA graph does."""

    def forward(self, hidden, microbatch):
        output, _ = super().forward(hidden[:1], microbatch)
        if microbatch == 0:
            self.kept = [torch.zeros_like(output)]
        return self.kept[0].detach().copy_(output.detach()).requires_grad_(), microbatch


def run_static(rank, num_ranks, mode):
    place = None if mode == "threads" else rank
    stages, good = parity_bad.good_call(place)
    if place in (None, 0):
        good["stages"][0] = StaticStage(5, 0, torch.float64)
    try:
        rrfp.run_pipeline(**good, hint="gpipe", slack=0, max_in_flight=4)  # no backward between
    except Exception as caught:
        return describe(caught)
    return None


@pytest.mark.parametrize("mode", MODES)
def test_one_buffer_for_two_microbatches(mode):
    """Never silently wrong: the second microbatch would overwrite the first one's output."""
    group = worker_group(1, False) if mode == "threads" else worker_group(parity_bad.NUM_RANKS)
    for error in group.values(run_static, mode):
        assert error is not None
        assert error.error_type == "StageError"
        assert "stage 0 returned the same memory" in error.error_text
        assert error.error_attributes["task"] == "0F1"


def run_list(rank, num_ranks):
    """A list of stages although there are other processes."""
    stages, good = parity_bad.good_call(rank)
    try:
        rrfp.run_pipeline(**{**good, "stages": stages[:2]})
    except Exception as caught:
        return describe(caught)
    return None


def test_a_list_in_one_of_several_processes_is_named_where_something_is_missing():
    """Rank 1 would be told to pass microbatches on rank 0, where they are."""
    answers = worker_group(parity_bad.NUM_RANKS).values(run_list)
    missing = ["targets", "targets", "microbatches"]
    for error, name in zip(answers, missing, strict=True):
        assert error.error_type == "ValueError"
        assert f"{name} is None" in error.error_text and "rank 0" not in error.error_text
        assert "this process, one of 3, runs a whole pipeline of its own" in error.error_text


def test_refusals_are_many():
    """The table is what the promise names, and hostile values beside it."""
    assert len(cases("threads")) > 60
    assert len(cases("processes")) > 60


def test_a_stage_index_that_is_far_too_large():
    stages = {0: torch.nn.Linear(4, 4), 10**18: torch.nn.Linear(4, 4)}
    with pytest.raises(ValueError, match=r"stage 1 is missing \(rank 0 has \[0, 10{18}\]\)"):
        rrfp.run_pipeline(stages, [torch.ones(2, 4)], forward_only=True)
