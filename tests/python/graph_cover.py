"""Steps in which every two features of graphs and stages meet, and their plain loop.

A case is a function of its row and seed. Stages count what they do: calls, recomputations of
checkpointed parts, and each gradient that a custom function computes.
"""

from collections import Counter

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5


class Counted(torch.autograd.Function):
    """hidden * scale; counts its forwards and each gradient it computes."""

    @staticmethod
    def forward(ctx, hidden, scale, counts):
        counts["custom forward"] += 1
        ctx.counts = counts
        ctx.save_for_backward(hidden, scale)
        return hidden * scale

    @staticmethod
    def backward(ctx, gradient):
        hidden, scale = ctx.saved_tensors
        ctx.counts["custom backward"] += 1
        for_hidden = for_scale = None
        if ctx.needs_input_grad[0]:
            ctx.counts["custom gradient of the input"] += 1
            for_hidden = gradient * scale
        if ctx.needs_input_grad[1]:
            ctx.counts["custom gradient of the parameter"] += 1
            for_scale = (gradient * hidden).sum(0)
        return for_hidden, for_scale, None


class Node(nn.Module):
    """A map of each input, then a block that may be checkpointed, then a custom function."""

    def __init__(self, case, index):
        super().__init__()
        generator = torch.Generator().manual_seed(case.seed * 1009 + index)
        num_inputs = max(1, len(case.sources_of(index)))
        self.maps = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(num_inputs))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.empty(WIDTH, dtype=torch.float64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
        self.requires_grad_(index != case.frozen_stage)
        self.checkpoint, self.adds = case.checkpoint, case.aux_loss and index % 2 == 0
        self.counts = Counter()
        self.added = None  # a plain loop collects here

    def block(self, hidden):
        self.counts["block"] += 1
        hidden = self.norm(hidden)
        return torch.tanh(self.inner(hidden)) + self.norm(hidden * 0.5)  # the norm is used twice

    def forward(self, *inputs, gain=1.0):
        import rrfp

        self.counts["stage"] += 1
        hidden = sum(layer(value) for layer, value in zip(self.maps, inputs, strict=True))
        if self.checkpoint == "none":
            hidden = self.block(hidden)
        else:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.checkpoint == "reentrant")
        output = Counted.apply(hidden, self.scale, self.counts) * gain
        if self.adds:
            value = 0.1 * output.square().mean()
            rrfp.aux_loss(value) if self.added is None else self.added.append(value)
        return output


def make_stages(case):
    stages = [Node(case, index) for index in range(4)]
    if case.tied:
        (a, _), (d, _) = case.tied_groups
        with torch.no_grad():
            stages[d].scale.copy_(stages[a].scale)
    return stages


def loss_fn(output, target):
    return (output - target).square().mean()


def tables(case):
    """(inputs by source stage, targets by loss stage, kwargs by stage)."""
    generator = torch.Generator().manual_seed(case.seed)
    sizes = [1 + (case.seed + m) % 3 for m in range(5)]

    def values():
        return [torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
                for size in sizes]

    inputs = {stage: values() for stage in case.source_stages}
    targets = {stage: values() for stage in case.loss_stages}
    kwargs = {s: [{"gain": 1 + 0.1 * (m + s)} for m in range(5)] for s in (0, 2) if case.kwargs}
    return inputs, targets, kwargs


def plain_loop(case):
    """(stages with gradients and counts, {loss stage: losses})."""
    stages = make_stages(case)
    if case.tied:
        (a, _), (d, _) = case.tied_groups
        stages[d].scale = stages[a].scale
    inputs, targets, kwargs = tables(case)
    losses = {stage: [] for stage in case.loss_stages}
    for m in range(5):
        outputs, added = {}, []
        for index in case.topological:
            stages[index].added = added
            taken = [outputs[source] for source in case.sources_of(index)]
            outputs[index] = stages[index](*(taken or [inputs[index][m]]),
                                           **(kwargs[index][m] if index in kwargs else {}))
        total = sum(value for value in added if value.requires_grad)
        for stage in case.loss_stages:
            loss = loss_fn(outputs[stage], targets[stage][m])
            losses[stage].append(loss.detach())
            total = total + loss
        total.backward()
    return stages, losses


def run_rank(rank, num_ranks, case, in_process):
    """({stage: (counts, {parameter: gradient})}, losses by stage) of this process."""
    import rrfp

    stages = {index: stage for index, stage in enumerate(make_stages(case))
              if in_process or case.rank_of_stage[index] == rank}

    def own(table):
        return {stage: items for stage, items in table.items() if stage in stages} or None

    inputs, targets, kwargs = tables(case)
    result = rrfp.run_pipeline(
        list(stages.values()) if in_process else stages, own(inputs), own(targets), loss_fn,
        stage_kwargs=own(kwargs), **case.options(),
    )
    losses = result.losses
    if losses is not None and not isinstance(losses, dict):
        losses = {case.loss_stages[0]: losses}
    found = {index: (stage.counts, {name: p.grad for name, p in stage.named_parameters()})
             for index, stage in stages.items()}
    return found, losses or {}


def check(case, answers):
    """Gradients, losses and counts of work are the plain loop's."""
    stages, losses = plain_loop(case)
    found = {index: entry for part, _ in answers for index, entry in part.items()}
    told = {stage: table for _, part in answers for stage, table in part.items()}
    assert sorted(found) == [0, 1, 2, 3] and sorted(told) == case.loss_stages
    for stage, table in losses.items():
        for ours, theirs in zip(told[stage], table, strict=True):
            assert abs(ours - theirs) <= 1e-10 * max(1.0, abs(theirs)), f"loss of stage {stage}"
    for index, (counts, gradients) in found.items():
        assert counts == stages[index].counts, f"stage {index}: {counts}, {stages[index].counts}"
        if stages[index].scale.requires_grad:  # it recomputes once per microbatch
            expected = 5 if case.checkpoint == "none" else 10
            assert counts["block"] == expected, f"stage {index} ran its block {counts['block']}x"
        for name, got in gradients.items():
            want = stages[index].get_parameter(name).grad
            assert (want is None) == (got is None), f"{name} of stage {index}"
            if want is not None:
                error = (got - want).norm() / want.norm().clamp_min(1e-12)
                assert error <= 1e-10, f"{name} of stage {index} is off by {error:.2e}"
