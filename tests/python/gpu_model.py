"""A model in stages for GPUs, its inputs, and the plain loop it is compared with.

Everything is a pure function of a seed, so that each process builds its own part. Nothing here
imports rrfp: this is the reference. Stages keep the device busy for random times, so that
messages come early, late and out of order.
"""

import contextlib
import random

import torch
from torch import nn

WIDTH = 64


class GpuStage(nn.Module):
    """(hidden) -> hidden; ``busy_cycles`` bounds the idle kernel before and after its work."""

    def __init__(self, seed, index, busy_cycles=0, dropout=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed * 1009 + index)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.mix.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self.drop = nn.Dropout(dropout)
        self.busy_cycles = busy_cycles
        self.random = random.Random(seed * 31 + index)

    def busy(self):
        if self.busy_cycles:
            torch.cuda._sleep(self.random.randrange(self.busy_cycles))

    def forward(self, hidden):
        self.busy()
        hidden = hidden + self.drop(torch.nn.functional.gelu(self.mix(self.norm(hidden))))
        self.busy()
        return hidden


def make_stages(seed, devices, dtype, busy_cycles=0, dropout=0.0):
    """One stage per entry of ``devices``, at these devices."""
    return [
        GpuStage(seed, index, busy_cycles, dropout).to(device=device, dtype=dtype)
        for index, device in enumerate(devices)
    ]


def make_batch(seed, num_microbatches, device, dtype, longest=40):
    """(inputs, targets) per microbatch, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_microbatches,), generator=generator).tolist()

    def tensors():
        return [
            torch.randn(length, WIDTH, generator=generator).to(device=device, dtype=dtype)
            for length in lengths
        ]

    return tensors(), tensors()


def loss_fn(output, target):
    return (output.float() - target.float()).square().mean()


def plain_loop(stages, inputs, targets, autocast=False, around=None):
    """Losses and the gradients of every stage, by a loop over the microbatches.

    ``around(stage index, microbatch)`` is a context for each forward.
    """
    for stage in stages:
        stage.zero_grad()
    losses = []
    for microbatch, (hidden, target) in enumerate(zip(inputs, targets, strict=True)):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            for index, stage in enumerate(stages):
                with around(index, microbatch) if around else contextlib.nullcontext():
                    hidden = stage(hidden.to(next(stage.parameters()).device))
            loss = loss_fn(hidden, target.to(hidden.device))
        (loss / len(inputs)).backward()
        losses.append(loss.item())
    return losses, [gradients_of(stage) for stage in stages]


def gradients_of(stage):
    return [parameter.grad.detach().float().cpu().clone() for parameter in stage.parameters()]


def check_close(got, expected, dtype):
    """Assert that gradients agree within what the order of additions may change.

    With ``dtype`` None they must have the same bits.
    """
    limit = {None: 0.0, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    for ours, theirs in zip(got, expected, strict=True):
        scale = theirs.abs().max().item() + 1e-6
        wrong = (ours - theirs).abs().max().item()
        assert wrong <= limit * scale, f"off by {wrong}, with values up to {scale}"
