"""A gradient on its way has memory of its own, whoever else autograd gave it to.

Would catch: a parameter that keeps the memory of a gradient as its .grad, to which the next
backward adds before the gradient has been read; one gradient handed to two stages.
"""

import time

import pytest
import torch
from torch import nn

import rrfp

NUM_MICROBATCHES = 6


class Offset(nn.Module):
    """Its parameter's gradient is a view of the incoming one."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))

    def forward(self, x):
        return x + self.offset.view(-1)


class Add(nn.Module):
    def forward(self, a, b):
        return a + b


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient


class LateLinear(nn.Module):
    """Reads its gradient late, when another backward has begun elsewhere."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        return _Late.apply(self.linear(x))


class OffsetLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))

    def forward(self, output, target):
        return (output.view(-1) + self.offset.view(-1)).square().sum()


class AddGiven(nn.Module):
    def forward(self, x, offset):
        return x + offset.view(-1)


def batches():
    torch.manual_seed(7)
    return [torch.randn(8, dtype=torch.float64) for _ in range(NUM_MICROBATCHES)]


def check(parameters, loss_of, run):
    """`run` gives the parameters the gradients of the mean of `loss_of` over the microbatches."""
    losses = sum(loss_of(batch) for batch in batches()) / NUM_MICROBATCHES
    expected = torch.autograd.grad(losses, parameters)
    run()
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("placement", [[0, 0, 0], [0, 1, 2], [0, 1, 0]])
@pytest.mark.parametrize("hint", ["gpipe", "auto"])
def test_two_producers_of_one_sum(hint, placement, split):
    stages = [nn.Linear(8, 8, dtype=torch.float64), Offset(), Add()]

    def loss_of(batch):
        first = stages[0](batch)
        return stages[2](first, stages[1](first)).square().sum()

    check([p for stage in stages for p in stage.parameters()], loss_of, lambda: rrfp.run_pipeline(
        stages, batches(), [None] * NUM_MICROBATCHES, lambda output, _: output.square().sum(),
        edges=[(0, 1), (0, 2), (1, 2)], placement=placement, hint=hint, split_backward=split,
        max_in_flight=3 * NUM_MICROBATCHES))


@pytest.mark.parametrize("split", [False, True])
def test_a_parameter_of_the_loss(split):
    stages, loss_fn = [LateLinear(), nn.Identity()], OffsetLoss()
    parameters = [*stages[0].parameters(), loss_fn.offset]
    check(parameters, lambda batch: loss_fn(stages[0](batch), None), lambda: rrfp.run_pipeline(
        stages, batches(), [None] * NUM_MICROBATCHES, loss_fn, split_backward=split,
        max_in_flight=NUM_MICROBATCHES))


@pytest.mark.parametrize("split", [False, True])
def test_a_parameter_among_the_keywords(split):
    stages = [LateLinear(), AddGiven()]
    offset = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
    parameters = [*stages[0].parameters(), offset]
    check(parameters, lambda batch: stages[1](stages[0](batch), offset).square().sum(),
          lambda: rrfp.run_pipeline(
              stages, batches(), [None] * NUM_MICROBATCHES, lambda output, _: output.square().sum(),
              split_backward=split, max_in_flight=NUM_MICROBATCHES,
              stage_kwargs={1: [{"offset": offset}] * NUM_MICROBATCHES}))


class SameTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        out = self.linear(x)
        return out, out, out[2:6]


class WritesFirst(nn.Module):
    def forward(self, a, b, c):
        a.mul_(2)
        return a + b + c.sum()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("placement", [[0, 0], [0, 1]])
def test_outputs_that_overlap_are_tensors_apart(placement, split):
    stages = [SameTwice(), WritesFirst()]

    def loss_of(batch):
        out = stages[0].linear(batch)
        return (2 * out + out + out[2:6].sum()).square().sum()

    check(list(stages[0].parameters()), loss_of, lambda: rrfp.run_pipeline(
        stages, batches(), [None] * NUM_MICROBATCHES, lambda output, _: output.square().sum(),
        placement=placement, split_backward=split))
