"""The stages of ``feature_pairs`` and the plain loop over them."""

import contextlib
import functools
import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_STAGES, WIDTH, SEED = 4, 4, 11


class Meeting(torch.autograd.Function):
    """The mean over the ranks that share a stage, which all have the same, in both directions."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return _mean(value, group)

    @staticmethod
    def backward(ctx, gradient):
        return _mean(gradient, ctx.group), None


def _mean(value, group):
    total = value.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total / group.size()


def _mixed(hidden, weight, bias):
    return torch.tanh(nn.functional.linear(hidden, weight, bias))


@functools.cache
def _compiled():
    """Compiled once for all cases of a process, but for what changes: modes and frozen tensors."""
    return torch.compile(_mixed, backend="aot_eager", dynamic=True)


class Stage(nn.Module):
    """``add_loss`` takes an auxiliary loss: rrfp's function, or a list's append. ``meets`` are the
    ranks that share the stage, if any; ``compiles`` says whether it may be compiled."""

    def __init__(self, index, on, add_loss, meets=None, compiles=False):
        super().__init__()
        generator = torch.Generator().manual_seed(SEED + index)
        self.index, self.on, self.add_loss, self.meets = index, on, add_loss, meets
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.mix.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
            if "tied" in on and index == NUM_STAGES - 1:  # a copy of the first stage's
                first = torch.Generator().manual_seed(SEED)
                self.mix.weight.copy_(torch.randn(WIDTH, WIDTH, generator=first) * 0.6)
        self.cast = torch.randn(WIDTH, WIDTH, generator=generator)
        self.norm = None
        if "batch_norm" in on:  # a mean over all forwards: their order is nobody's promise
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None, dtype=torch.float64)
        if "frozen" in on and index == 1:
            self.requires_grad_(False)
        self.mixed = _compiled() if compiles and "compile" in on and index == 2 else _mixed

    def body(self, hidden):
        hidden = self.mixed(hidden, self.mix.weight, self.mix.bias)
        if "autocast" in self.on:  # in bfloat16 there, which no rounding of float64 hides
            hidden = hidden + 0.1 * (hidden.float() @ self.cast).double()
        if self.norm is not None:
            hidden = self.norm(hidden)
        if "dropout" in self.on:
            hidden = nn.functional.dropout(hidden, 0.3, self.training)
        return hidden

    def forward(self, *values, gain=1.0):
        plain = [value["h"] if isinstance(value, dict) else value for value in values]
        hidden = sum(plain) * gain
        if self.meets is not None:
            hidden = Meeting.apply(hidden, self.meets)
        if "checkpoint" in self.on:
            hidden = checkpoint(self.body, hidden, use_reentrant=False)
        else:
            hidden = self.body(hidden)
        if "auxiliary" in self.on and self.index == 2 and torch.is_grad_enabled():
            self.add_loss(0.1 * hidden.square().mean())
        if "trees" not in self.on:
            return hidden
        return {"h": hidden, "none": None, "tag": torch.tensor([self.index])}


def hidden_of(output):
    return output["h"] if isinstance(output, dict) else output


def squared_error(output, target):
    return (hidden_of(output) - target).square().mean()


def edges_of(on):
    """A chain, or two sources that join in stage 2; with a skip."""
    if "graph" in on:
        return [(0, 2), (1, 2), (2, 3)] + ([(0, 3)] if "skip" in on else [])
    chain = [(s, s + 1) for s in range(NUM_STAGES - 1)]
    return [*chain, (0, 2)] if "skip" in on else chain


def sources_of(on):
    return [0, 1] if "graph" in on else [0]


def loss_stages_of(on):
    return [2, NUM_STAGES - 1] if "graph" in on else [NUM_STAGES - 1]


def modes_of(on, packed):
    """The caller's modes, as a context; ``packed`` counts what a saved-tensor hook has packed."""
    stack = contextlib.ExitStack()
    if "autocast" in on:
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
    if "hooks" in on:
        def pack(tensor):
            packed.append(1)
            return (2 * tensor, True) if tensor.is_floating_point() else (tensor, False)

        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(
            pack, lambda kept: kept[0] / 2 if kept[1] else kept[0]))
    return stack


def batch_of(case, step):
    seed, on = case
    rng = random.Random(seed + step)
    count = 1 if "few" in on else 5
    rows = [rng.randint(2, 5) if "shapes" in on else 3 for _ in range(count)]
    generator = torch.Generator().manual_seed(seed + step)
    draw = [torch.randn(r, WIDTH, generator=generator, dtype=torch.float64)
            for r in rows for _ in range(2)]
    return draw[0::2], draw[1::2], rows


def factors(on, rows):
    if "weights" in on:
        weights = [r / sum(rows) for r in rows]
    else:
        weights = [1 / len(rows)] * len(rows)
    return weights, [w * (8.0 if "scale" in on else 1.0) for w in weights]


def kwargs_of(on, rows):
    return [{"gain": 1.0 + 0.1 * m} for m in range(len(rows))] if "kwargs" in on else None


def num_steps(on):
    """Bytes are measured in the first step, and counted from the second on."""
    return 2 if on & {"accumulate", "measured"} else 1


def reference(case):
    """By step (eval steps too) {loss stage: losses}, outputs of the last, gradients by name."""
    import rrfp

    _, on = case
    auxiliary = []
    stages = [Stage(s, on, auxiliary.append) for s in range(NUM_STAGES)]
    counter, losses, outputs = 0, [], None

    def forward(step, microbatch, value, target, kwargs):
        """{loss stage: loss}, {loss stage: output}."""
        values = {}
        for index, stage in enumerate(stages):
            given = [values[a] for a, b in edges_of(on) if b == index] or [value]
            keywords = kwargs[microbatch] if kwargs and index == 2 else {}
            with rrfp.task_rng(SEED, step, index, microbatch):
                values[index] = stage(*given, **keywords)
        ends = {s: values[s] for s in loss_stages_of(on)}
        return {s: squared_error(end, target) for s, end in ends.items()}, ends

    for step in range(num_steps(on)):
        inputs, targets, rows = batch_of(case, step)
        kwargs = kwargs_of(on, rows)
        order = range(len(rows))
        if "mid" in on:
            ranked = sorted(order, key=lambda m: (rows[m], m))
            order = ranked[0::2] + ranked[1::2][::-1]
        found, outputs = ({s: [None] * len(rows) for s in loss_stages_of(on)} for _ in range(2))
        for m in order:
            auxiliary.clear()
            with modes_of(on, []):
                of_stage, ends = forward(counter, m, inputs[m], targets[m], kwargs)
                total = sum(auxiliary) + sum(of_stage.values())
            (total * factors(on, rows)[1][m]).backward()
            for s in of_stage:
                found[s][m], outputs[s][m] = of_stage[s].item(), hidden_of(ends[s]).detach()
        losses.append(found)
        counter += 1
        if "evaluate" in on:
            for stage in stages:
                stage.eval()
            with torch.no_grad(), modes_of(on, []):
                of_all = [forward(counter, m, inputs[m], targets[m], kwargs)[0]
                          for m in range(len(rows))]
            losses.append({s: [of[s].item() for of in of_all] for s in loss_stages_of(on)})
            for stage in stages:
                stage.train()
            counter += 1
    gradients = {f"{s}.{name}": p.grad for s, stage in enumerate(stages)
                 for name, p in stage.named_parameters()}
    if "tied" in on:
        total = gradients["0.mix.weight"] + gradients["3.mix.weight"]
        gradients["0.mix.weight"] = gradients["3.mix.weight"] = total
    return losses, outputs, gradients
