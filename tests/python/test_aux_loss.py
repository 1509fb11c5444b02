"""Auxiliary losses of any stage count as the loss does; a plain loop that adds them is the oracle.

Would catch: a weight or grad_scale that is left out, a value of another microbatch, one counted
again when a checkpoint recomputes, or lost in it, a stage without one that gets its neighbour's.
"""

import pytest
import torch
from parity_group import describe, worker_group
from torch import nn
from torch.utils.checkpoint import checkpoint

import rrfp

NUM_STAGES, NUM_MICROBATCHES, WIDTH = 4, 6, 5
WEIGHTS = [0.5, 0.1, 0.2, 0.7, 0.3, 0.4]


class Experts(nn.Module):
    """A gated sum of maps; stages 1 and 2 add a balance of their gates, and stage 2 a second."""

    def __init__(self, index, how):
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.index, self.how = index, how
        self.gate = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        self.values = None  # a plain loop collects them here

    def add(self, value):
        if self.values is None:
            rrfp.aux_loss(value)
        else:
            self.values.append(value)

    def body(self, hidden):
        gates = torch.softmax(self.gate(hidden), dim=-1)
        if self.index in (1, 2):
            self.add(gates.mean(dim=0).square().sum())
        if self.index == 2:
            self.add(0.1 * hidden.square().mean(dim=0, keepdim=True).mean(dim=1))
        return hidden + sum(gates[:, i : i + 1] * m(hidden) for i, m in enumerate(self.maps))

    def forward(self, hidden):
        if self.how == "checkpoint":
            return checkpoint(self.body, hidden, use_reentrant=False)
        return self.body(hidden)


def loss_fn(output, target):
    return (output - target).square().mean()


def batch():
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(2 + m % 3, WIDTH, generator=generator, dtype=torch.float64)
             for m in range(NUM_MICROBATCHES)] for _ in range(2)]


def plain_loop(factors):
    stages = [Experts(index, "plain") for index in range(NUM_STAGES)]
    losses = []
    for hidden, target, factor in zip(*batch(), factors, strict=True):
        values = []
        for stage in stages:
            stage.values = values
            hidden = stage(hidden)
        loss = loss_fn(hidden, target)
        losses.append(loss.item())
        ((loss + sum(v.sum() for v in values)) * factor).backward()
    return stages, losses


def run_rank(rank, num_ranks, in_process, how, options):
    """Gradients of this process's stages, and the losses."""
    own = {s: Experts(s, how) for s in range(NUM_STAGES) if in_process or s % 2 == rank}
    inputs, targets = batch()
    result = rrfp.run_pipeline(
        list(own.values()) if in_process else own,
        inputs if 0 in own else None,
        targets if NUM_STAGES - 1 in own else None,
        loss_fn,
        num_ranks=2,
        stall_timeout_s=30.0,
        **options,
    )
    gradients = {f"{s}.{n}": p.grad for s, m in own.items() for n, p in m.named_parameters()}
    return gradients, result.losses and [loss.item() for loss in result.losses]


@pytest.mark.parametrize("in_process", [True, False], ids=["threads", "processes"])
@pytest.mark.parametrize("how", ["plain", "checkpoint"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_reduction": WEIGHTS, "grad_scale": 8.0},
        {"split_backward": True, "loss_reduction": "sum"},
        {"deterministic": True, "microbatch_order": [3, 0, 5, 1, 4, 2]},
        {"hint": "interleaved", "slack": 0},
    ],
    ids=["defaults", "weights", "split", "deterministic", "interleaved"],
)
def test_counts_as_the_loss_does(in_process, how, options):
    reduction = options.get("loss_reduction", "mean")
    factors = {"mean": [1 / NUM_MICROBATCHES] * NUM_MICROBATCHES,
               "sum": [1.0] * NUM_MICROBATCHES}.get(str(reduction), reduction)
    stages, losses = plain_loop([f * options.get("grad_scale", 1.0) for f in factors])
    group = worker_group(1, distributed=False) if in_process else worker_group(2)
    answers = group.values(run_rank, in_process, how, options)
    found = {name: g for gradients, _ in answers for name, g in gradients.items()}
    told = next(losses for _, losses in answers if losses is not None)
    assert told == pytest.approx(losses, rel=1e-12)
    for s, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            error = (found[f"{s}.{name}"] - parameter.grad).norm() / parameter.grad.norm()
            assert error <= 1e-10, f"{name} of stage {s} is off by {error:.1e}"


class Calls(nn.Module):
    """Runs ``act(hidden)`` in its forward and hands ``hidden`` times a weight on."""

    def __init__(self, act):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.act = act

    def forward(self, hidden):
        hidden = hidden * self.weight
        self.act(self, hidden)
        return hidden


def run_calls(act, split=None, forward_only=False):
    """(gradient of the first stage's weight, of the second's)."""
    stages = [Calls(act), Calls(lambda stage, hidden: None)]
    rrfp.run_pipeline(stages, [torch.full((), 2.0)], [None], lambda out, _: out,
                      split_backward=split, forward_only=forward_only)
    return [stage.weight.grad and stage.weight.grad.item() for stage in stages]


def disabled(stage, hidden):
    with torch.no_grad():
        rrfp.aux_loss(hidden.sum())


def reentrant(stage, hidden):
    checkpoint(lambda h: rrfp.aux_loss(h.square()) or h * 1, hidden, use_reentrant=True)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (disabled, ["gradients are disabled", "no_grad"]),
        (reentrant, ["reentrant checkpoint"]),
        (lambda stage, hidden: rrfp.aux_loss(hidden.expand(3)), ["(3,)", "scalar"]),
        (lambda stage, hidden: rrfp.aux_loss(1.0), ["float"]),
    ],
)
def test_what_would_be_lost_or_is_no_scalar_is_refused(act, words):
    with pytest.raises(rrfp.StageError) as caught:
        run_calls(act)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("split", [None, True])
def test_special_values(split):
    """A leaf, an output, one value twice, and a constant."""
    assert run_calls(lambda stage, hidden: rrfp.aux_loss(stage.weight), split) == [3.0, 2.0]
    assert run_calls(lambda stage, hidden: rrfp.aux_loss(hidden), split) == [4.0, 2.0]
    assert run_calls(lambda stage, hidden: rrfp.aux_loss(torch.ones(())), split) == [2.0, 2.0]

    def twice(stage, hidden):
        value = hidden.square()
        rrfp.aux_loss(value)
        rrfp.aux_loss(value)

    assert run_calls(twice, split) == [18.0, 2.0]


def test_nothing_happens_without_a_step_that_trains():
    stage = Calls(lambda stage, hidden: rrfp.aux_loss(hidden.square()))
    stage(torch.ones(())).backward()
    assert stage.weight.grad.item() == 1.0
    assert run_calls(disabled, forward_only=True) == [None, None]
    assert run_calls(lambda stage, hidden: rrfp.aux_loss("x"), forward_only=True) == [None, None]


def test_compiled_stage():
    """A compiled forward leaves compiled code for the call, and the value keeps its graph."""
    stages = [torch.compile(Calls(lambda stage, hidden: rrfp.aux_loss(hidden.square())),
                            backend="eager"), Calls(lambda stage, hidden: None)]
    rrfp.run_pipeline(stages, [torch.full((), 2.0)] * 2, [None] * 2, lambda out, _: out)
    assert stages[0].weight.grad.item() == 10.0


def run_disagreeing(rank, num_ranks):
    stages = {rank: Experts(rank, "plain")}
    inputs, targets = batch()
    try:
        rrfp.run_pipeline(stages, inputs if rank == 0 else None, targets if rank == 1 else None,
                          loss_fn, grad_scale=1.0 + rank)
    except Exception as caught:
        return describe(caught)
    return None


def test_ranks_that_disagree_on_the_scale():
    for error in worker_group(2).values(run_disagreeing):
        assert error.error_type == "ValueError"
        assert "disagree on grad_scale: rank 0 has 1.0, rank 1 has 2.0" in error.error_text
