"""Stages that sleep for tabled times: a pipeline whose timing is known and needs no cores.

The durations follow packed sequences as training jobs show them. Fitted constants, source:
ByteDance-Seed/StragglerAnalysis trace SE (a Megatron-style job, 2 pipeline stages, packed
sequences). Every microbatch has one relative attention load that all stages and both kinds
share; what is left is small independent noise.
"""

import math
import random
import time

import torch
from torch import nn

# Coefficient of variation of a task within a rank (trace SE: 21.9 % and 37.2 %).
CV_FORWARD, CV_BACKWARD = 0.22, 0.37
# Log standard deviation of the independent part (.050 and .055; it leaves a correlation of
# .996 between the stages for one microbatch).
NOISE_FORWARD, NOISE_BACKWARD = 0.050, 0.055
# Median backward over median forward (288.2 / 145.5 ms).
BACKWARD_OVER_FORWARD = 2.0
# The last stage relative to the others (1.79 and 1.48).
LAST_FORWARD, LAST_BACKWARD = 1.8, 1.5
# Spread of the shared load before it is scaled to the coefficients above: packed attention is
# bounded below (many short documents) and has a long tail (one document fills the sequence).
LOAD_SIGMA = 1.0

KINDS = "FB"


def packed_durations(seed, num_stages, num_microbatches, forward_s, balanced=False):
    """{(kind, stage, microbatch): seconds} and the relative load of each microbatch.

    ``balanced``: the last stage is as heavy as the others.
    """
    rng = random.Random(seed)
    loads = [
        math.exp(rng.gauss(0, LOAD_SIGMA) - LOAD_SIGMA**2 / 2) for _ in range(num_microbatches)
    ]
    load_cv = math.sqrt(math.expm1(LOAD_SIGMA**2))
    shapes = {
        "F": (forward_s, CV_FORWARD, NOISE_FORWARD, LAST_FORWARD),
        "B": (forward_s * BACKWARD_OVER_FORWARD, CV_BACKWARD, NOISE_BACKWARD, LAST_BACKWARD),
    }
    durations = {}
    for kind, (base_s, cv, noise, last) in shapes.items():
        shared = math.sqrt(max(0.0, cv**2 - math.expm1(noise**2))) / load_cv
        for stage in range(num_stages):
            is_heavy = stage == num_stages - 1 and not balanced
            scale_s = base_s * (last if is_heavy else 1.0)
            for microbatch, load in enumerate(loads):
                jitter = math.exp(rng.gauss(0, noise))
                relative = (1 - shared) + shared * load
                durations[kind, stage, microbatch] = scale_s * relative * jitter
    return durations, loads


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, seconds):
        ctx.seconds = seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """Sleeps as ``durations`` says, around a small amount of true work."""

    def __init__(self, index, width=8):
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.ones(width))
        self.durations = {}

    def forward(self, hidden, microbatch):
        time.sleep(self.durations["F", self.index, microbatch])
        seconds = self.durations["B", self.index, microbatch]
        return SleepInBackward.apply(hidden * self.weight, seconds), microbatch


def loss_fn(output, target):
    return (output[0] - target).square().mean()


def batch(num_microbatches, width=8):
    inputs = [(torch.full((2, width), float(m)), m) for m in range(num_microbatches)]
    return inputs, [torch.zeros(2, width) for _ in range(num_microbatches)]
