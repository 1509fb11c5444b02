"""Mistakes that lose a gradient, or train something else, without a sign: refused or made right."""

import copy
import dataclasses
import pickle

import pytest
import torch
from parity_group import worker_group

import rrfp


class Scale(torch.nn.Module):
    """x * w, wrapped as `wrap` says."""

    def __init__(self, wrap=lambda y: y):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((2,), 1.5, dtype=torch.float64))
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x * self.w)


@dataclasses.dataclass
class Opaque:
    hidden: object


class OpaqueDict(dict):
    pass


def batch(count=4):
    torch.manual_seed(3)
    return [torch.randn(2, dtype=torch.float64) for _ in range(count)]


def total(output, target):
    return output.sum()


@pytest.mark.parametrize("wrap", [Opaque, lambda y: OpaqueDict(h=y), lambda y: [Opaque([y])]])
def test_a_tensor_inside_an_unknown_type_is_refused(wrap):
    """It would be pickled with the other small values, and its gradient would be lost."""
    with pytest.raises(rrfp.StageError, match="stage 0 returned a .* that holds a tensor"):
        rrfp.run_pipeline([Scale(wrap), torch.nn.Identity()], batch(), batch(), total)


def test_what_cannot_be_pickled_is_refused_in_one_process_too():
    with pytest.raises(rrfp.StageError, match="cannot be pickled"):
        rrfp.run_pipeline([Scale(lambda y: (y, lambda: 1)), Scale()], batch(), batch(), total)


def test_small_values_still_cross():
    seen = []

    class Last(torch.nn.Module):
        def forward(self, x, extra):
            seen.append(extra)
            return x

    stages = [Scale(lambda y: (y, {"name": "a", "at": (1, None, complex(1, 2))})), Last()]
    rrfp.run_pipeline(stages, batch(), batch(), total)
    assert seen == [{"name": "a", "at": (1, None, complex(1, 2))}] * 4


def test_an_input_that_requires_grad_is_refused():
    inputs = [x.requires_grad_() for x in batch()]
    with pytest.raises(ValueError, match="microbatch 0 holds a tensor that requires grad"):
        rrfp.run_pipeline([Scale(), Scale()], inputs, batch(), total)


@pytest.mark.parametrize("name", ["loss_reduction", "costs"])
@pytest.mark.parametrize("numbers", [{0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, {1.0, 2.0, 3.0, 4.0}])
def test_numbers_without_an_order_are_refused(name, numbers):
    """The keys of a dict are no weights."""
    with pytest.raises(TypeError, match="pass a sequence with one number per microbatch"):
        rrfp.run_pipeline([Scale(), Scale()], batch(), batch(), total, **{name: numbers})


def test_microbatch_indices_must_be_whole():
    with pytest.raises(TypeError, match="microbatch_order"):
        rrfp.run_pipeline([Scale(), Scale()], batch(), batch(), total,
                          microbatch_order=[0.9, 1.2, 2.0, 3.0])


def test_backward_inside_a_forward_adds_to_the_gradient():
    """An auxiliary loss that a stage runs backward itself reaches the stages before it."""

    def with_auxiliary(y):
        (0.5 * y.square().sum()).backward(retain_graph=True)
        return y.sin()

    stages, plain = ([Scale(), Scale(with_auxiliary), Scale()] for _ in range(2))
    rrfp.run_pipeline(stages, batch(), batch(), total, loss_reduction="sum")
    for x in batch():
        for stage in plain:
            x = stage(x)
        x.sum().backward()
    for ours, theirs in zip(stages, plain, strict=True):
        torch.testing.assert_close(ours.w.grad, theirs.w.grad, rtol=1e-12, atol=0)


def test_a_returned_parameter_is_not_changed_by_the_next_stage():
    class Parameter(Scale):
        def forward(self, x):
            return self.w

    class InPlace(torch.nn.Module):
        def forward(self, w):
            return w.mul_(3.0)

    first = Parameter()
    rrfp.run_pipeline([first, InPlace()], batch(), batch(), total, loss_reduction="sum")
    assert first.w.tolist() == [1.5, 1.5]
    assert first.w.grad.tolist() == [12.0, 12.0]


def test_an_exception_whose_text_is_broken_is_still_a_stage_error():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    def fail(error):
        raise error

    for error in (Unprintable(), OSError("no file \udcff here")):
        with pytest.raises(rrfp.StageError, match="0F"):
            rrfp.run_pipeline([Scale(lambda y, e=error: fail(e)), Scale()], batch(), batch(), total)


def test_a_launcher_without_a_process_group_is_noticed(monkeypatch, caplog):
    """Each process would train a pipeline of its own, without a word."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="init_process_group"):
        rrfp.run_pipeline(Scale(), batch(), batch(), total)
    with caplog.at_level("WARNING", logger="rrfp"):
        rrfp.run_pipeline([Scale(), Scale()], batch(), batch(), total)
    assert "a whole pipeline of its own" in caplog.text


def test_one_sequential_is_one_stage_and_said_to_be(caplog):
    layers = [torch.nn.Linear(2, 2, dtype=torch.float64) for _ in range(3)]
    for stages, is_warned in ((torch.nn.Sequential(*layers), True), (layers, False),
                              ([torch.nn.Sequential(*layers)], False)):
        caplog.clear()
        with caplog.at_level("WARNING", logger="rrfp"):
            result = rrfp.run_pipeline(stages, batch(), batch(), total)
        assert len(result.losses) == 4
        assert ("nn.Sequential of 3 modules" in caplog.text) == is_warned


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_not_copied(copied):
    with rrfp.Pipeline([Scale(), Scale()]) as pipeline:
        with pytest.raises(TypeError, match="build a new Pipeline of them"):
            copied(pipeline)
        pipeline.step(batch(), batch(), total)


def run_with_a_rank_too_many(rank, num_ranks, way):
    """Two modules on three ranks, as docs/pitfalls.md has it: (loss, own gradients)."""
    torch.manual_seed(4)
    parts = torch.nn.Sequential(Scale(), Scale())
    group, stage, last = None, None, num_ranks - 1
    if way == "left out":
        group, last = torch.distributed.new_group([0, 1]), 1
        stage = parts[rank] if rank < 2 else None
    else:
        stage = parts[2 * rank // num_ranks : 2 * (rank + 1) // num_ranks]
    if stage is None:
        return None, []
    result = rrfp.run_pipeline(stage, batch() if rank == 0 else None,
                               batch() if rank == last else None, total, group=group)
    rrfp.clip_grad_norm_(stage.parameters(), 1e9, group=group)
    losses = None if result.losses is None else [float(loss) for loss in result.losses]
    return losses, [p.grad.tolist() for p in stage.parameters()]


@pytest.mark.parametrize("way", ["left out", "empty stage"])
def test_a_rank_too_many(way):
    answers = worker_group(3).values(run_with_a_rank_too_many, way)
    plain = [Scale(), Scale()]
    losses = [total(plain[1](plain[0](x)), None) for x in batch()]
    sum(losses).div(4).backward()
    assert [given for given, _ in answers if given] == [pytest.approx([x.item() for x in losses])]
    got = sum((gradients for _, gradients in answers), [])
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64),
                               torch.stack([stage.w.grad for stage in plain]))
