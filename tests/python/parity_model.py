"""A small model whose stages record what was run, and the plain loop it is compared with.

Everything is a pure function of a seed, so that each process builds its own part. Nothing here
imports rrfp: this is the reference.
"""

import random
import time

import torch
from torch import nn

WIDTH = 6


class Mark(torch.autograd.Function):
    """Identity; its backward runs first in the stage's backward, records it and sleeps."""

    @staticmethod
    def forward(ctx, hidden, stage, microbatch):
        ctx.stage, ctx.microbatch = stage, microbatch
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage.record("B", ctx.microbatch)
        return gradient, None, None


class RecordingStage(nn.Module):
    """One stage: called with (hidden, microbatch), returns the same pair.

    ``log`` holds task texts in the order run, ``calls`` counts forwards, and ``delays`` maps
    (kind, microbatch) to seconds of sleep.
    """

    def __init__(self, seed, index, dtype, delays=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed * 1009 + index)
        self.index = index
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.scale = nn.Parameter(torch.empty(WIDTH, dtype=dtype))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        self.delays = delays or {}
        self.log = []
        self.calls = 0

    def record(self, kind, microbatch):
        self.log.append(f"{self.index}{kind}{microbatch}")
        delay_s = self.delays.get((kind, microbatch), 0.0)
        if delay_s:
            time.sleep(delay_s)

    def forward(self, hidden, microbatch):
        self.calls += 1
        self.record("F", microbatch)
        hidden = hidden + torch.tanh(self.mix(hidden)) * self.scale
        return Mark.apply(hidden, self, microbatch), microbatch


def squared_error(output, target):
    hidden, _ = output
    return (hidden - target).square().mean()


def make_batch(seed, step, num_microbatches, dtype):
    """Inputs of different lengths and targets different for each microbatch."""
    generator = torch.Generator().manual_seed(seed * 7919 + step)
    lengths = torch.randint(1, 6, (num_microbatches,), generator=generator).tolist()
    inputs, targets = [], []
    for microbatch, length in enumerate(lengths):
        inputs.append((torch.randn(length, WIDTH, generator=generator).to(dtype), microbatch))
        targets.append(torch.randn(length, WIDTH, generator=generator).to(dtype))
    return inputs, targets, [float(length) for length in lengths]


def make_delays(seed, stage, num_microbatches, kind):
    """Seconds of sleep per (task kind, microbatch) of one stage."""
    rng = random.Random(seed * 31 + stage)
    tasks = [(k, m) for k in "FB" for m in range(num_microbatches)]
    if kind == "random":
        return {task: rng.uniform(0, 0.003) for task in tasks if rng.random() < 0.4}
    if kind == "straggler" and seed % 3 == stage % 3:
        return dict.fromkeys(tasks, 0.001)
    if kind == "stall":
        return {rng.choice(tasks): 0.02}
    return {}


def plain_loop(stages, inputs, targets, loss_fn, factors):
    """Microbatch after microbatch through the whole model; returns the raw losses."""
    losses = []
    for value, target, factor in zip(inputs, targets, factors, strict=True):
        for stage in stages:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        loss = loss_fn(value, target)
        (loss * factor).backward()
        losses.append(loss.detach())
    return losses


def gradient_error(gradient, reference):
    """||gradient - reference|| / ||reference||; 0 when both are None, inf when one is."""
    if gradient is None or reference is None:
        return 0.0 if gradient is None and reference is None else float("inf")
    gradient, reference = torch.as_tensor(gradient), torch.as_tensor(reference)
    if gradient.shape != reference.shape or gradient.dtype != reference.dtype:
        return float("inf")
    difference = (gradient.double() - reference.double()).norm().item()
    norm = reference.double().norm().item()
    return difference / norm if norm else difference


# The fixed orders, written from their definitions: texts of one stage's tasks.


def gpipe_texts(stage, order):
    return [f"{stage}F{m}" for m in order] + [f"{stage}B{m}" for m in order]


def one_f_one_b_texts(stage, num_stages, order):
    """A stage keeps as many microbatches in flight as there are stages from it to the end."""
    texts, forwards, backwards = [], list(order), list(order)
    depth = num_stages - stage
    while backwards:
        in_flight = len(backwards) - len(forwards)
        if forwards and in_flight < depth:
            texts.append(f"{stage}F{forwards.pop(0)}")
        else:
            texts.append(f"{stage}B{backwards.pop(0)}")
    return texts


def mid_order(costs):
    """Shortest first and last, longest in the middle."""
    ranked = sorted(range(len(costs)), key=lambda m: (costs[m], m))
    return ranked[0::2] + ranked[1::2][::-1]


def random_valid_order(seed, num_stages, num_microbatches, same_forwards=False):
    """All tasks in the order of some random execution without limits: never a deadlock.

    ``same_forwards``: every stage has its forwards in the same (random) order, which bounded
    slack needs.
    """
    rng = random.Random(seed)
    done, texts = set(), []
    forwards = rng.sample(range(num_microbatches), num_microbatches)
    pending = [(k, s, m) for k in "FB" for s in range(num_stages) for m in range(num_microbatches)]

    def is_ready(task):
        kind, stage, microbatch = task
        if kind == "F":
            before = forwards[: forwards.index(microbatch)] if same_forwards else []
            if any(("F", stage, other) not in done for other in before):
                return False
            return stage == 0 or ("F", stage - 1, microbatch) in done
        if stage == num_stages - 1:
            return ("F", stage, microbatch) in done
        return ("B", stage + 1, microbatch) in done

    while pending:
        task = rng.choice([task for task in pending if is_ready(task)])
        pending.remove(task)
        done.add(task)
        texts.append(f"{task[1]}{task[0]}{task[2]}")
    return texts


def peak_units(texts, sizes=None):
    """The most in flight at once: microbatches, or what they take by ``sizes``."""
    held = peak = 0
    for text in texts:
        size = 1 if sizes is None else sizes[int(text.split("F" if "F" in text else "B")[1])]
        held += size if "F" in text else -size
        peak = max(peak, held)
    return peak
