"""Random graphs of stages on random ranks, and the plain loop they are compared with.

A case is a pure function of its seed, so every process builds its own part.
"""

import random
import time
from dataclasses import dataclass

import torch
from parity_group import worker_group
from torch import nn

WIDTH = 5
MAX_STAGES = 8


@dataclass(frozen=True)
class GraphCase:
    """``rank_of_stage`` is given to rrfp as ``placement``, which may be its name."""

    seed: int
    edges: tuple
    rank_of_stage: tuple
    placement: object
    loss_stages: tuple
    frozen: tuple
    num_microbatches: int
    hint: str
    slack: object
    limit: int | None
    split: bool | None
    deterministic: bool
    dtype: str

    def __str__(self):
        return (
            f"{self.seed}-{self.placement}-{list(self.edges)}-losses{list(self.loss_stages)}-"
            f"{self.hint}-{self.slack}-{self.limit}-{self.split}-{self.deterministic}-{self.dtype}"
        )

    @property
    def num_stages(self):
        return len(self.rank_of_stage)

    @property
    def num_ranks(self):
        return max(self.rank_of_stage) + 1

    def sources_of(self, stage):
        return [source for source, target in self.edges if target == stage]

    def options(self):
        return {
            "edges": list(self.edges),
            "placement": self.placement,
            "num_ranks": self.num_ranks,
            "loss_stages": list(self.loss_stages),
            "hint": self.hint,
            "slack": self.slack,
            "max_in_flight": self.limit,
            "split_backward": self.split,
            "deterministic": self.deterministic,
            "stall_timeout_s": 30.0,
        }


def draw_case(seed, num_ranks=None):
    """A case; with num_ranks, one for that many ranks."""
    rng = random.Random(seed)
    num_ranks = num_ranks or rng.randint(1, 4)
    if rng.random() < 0.4:
        return chain_case(rng, seed, num_ranks)
    num_stages = rng.randint(max(2, num_ranks), MAX_STAGES)
    pairs = [(i, j) for j in range(num_stages) for i in range(j)]
    edges = sorted(rng.sample(pairs, rng.randint(1, len(pairs) // 2 + 1)))
    ranks = list(range(num_ranks)) + [
        rng.randrange(num_ranks) for _ in range(num_stages - num_ranks)
    ]
    rng.shuffle(ranks)
    sinks = [s for s in range(num_stages) if all(source != s for source, _ in edges)]
    inner = [s for s in range(num_stages) if s not in sinks and rng.random() < 0.2]
    return finish_case(rng, seed, edges, tuple(ranks), tuple(ranks), sorted(sinks + inner),
                       ["auto", "bf", "gpipe", "fb", "b-priority", "f-priority", "bfw"])


def chain_case(rng, seed, num_ranks):
    """Two stages per rank, by the names of placements and orders."""
    num_stages = 2 * num_ranks
    placement = rng.choice(["loop", "v"])
    ranks = [s % num_ranks if placement == "loop" or s < num_ranks else num_stages - 1 - s
             for s in range(num_stages)]
    edges = [(s, s + 1) for s in range(num_stages - 1)]
    named = "interleaved" if placement == "loop" else "zbv"
    return finish_case(rng, seed, edges, tuple(ranks), placement, [num_stages - 1],
                       ["auto", "bf", "bfw", "gpipe", named, named])


def finish_case(rng, seed, edges, ranks, placement, loss_stages, hints):
    hint = rng.choice(hints)
    num_microbatches = rng.randint(1, 4) * (max(ranks) + 1)
    split = rng.choice([None, True])
    most_on_a_rank = max(map(ranks.count, ranks))
    slack = rng.choice([0, None, "auto"] if max(map(ranks.count, ranks)) > 1 else [0, 3, "auto"])
    return GraphCase(
        seed=seed,
        edges=tuple(edges),
        rank_of_stage=ranks,
        placement=placement,
        loss_stages=tuple(loss_stages),
        frozen=tuple(s for s in range(len(ranks)) if rng.random() < 0.15 and s not in loss_stages),
        num_microbatches=num_microbatches,
        hint=hint,
        slack=slack,
        limit=None if slack == 0 else rng.choice([None, most_on_a_rank, 3 * most_on_a_rank]),
        split=split,
        deterministic=rng.random() < 0.25,
        dtype=rng.choice(["float64", "float64", "float32"]),
    )


class Node(nn.Module):
    """tanh of a linear map of each input, summed and scaled; some write in place."""

    def __init__(self, case, index):
        super().__init__()
        num_inputs = max(1, len(case.sources_of(index)))
        generator = torch.Generator().manual_seed(case.seed * 1009 + index)
        dtype = getattr(torch, case.dtype)
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(num_inputs))
        self.scale = nn.Parameter(torch.empty(WIDTH, dtype=dtype))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
        self.requires_grad_(index not in case.frozen)
        self.writes_in_place = (case.seed + index) % 3 == 0 and num_inputs > 1
        self.delays = random.Random(case.seed * 31 + index)
        self.sleeps = False
        self.calls = 0

    def forward(self, *inputs):
        self.calls += 1
        if self.sleeps:
            time.sleep(self.delays.choice([0.0, 0.0, 0.001]))
        if self.writes_in_place and inputs[0].requires_grad:
            inputs = (inputs[0].mul_(1.0), *inputs[1:])
        mixed = sum(layer(value) for layer, value in zip(self.maps, inputs, strict=True))
        return torch.tanh(mixed) * self.scale


def loss_fn(output, target):
    return (output - target).square().mean()


def batch(case):
    """(microbatches of different lengths, {loss stage: targets})."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    sizes = [1 + (case.seed + m) % 4 for m in range(case.num_microbatches)]

    def values():
        return [torch.randn(size, WIDTH, generator=generator).to(dtype) for size in sizes]

    return values(), {stage: values() for stage in case.loss_stages}


def plain_loop(case):
    """(stages with gradients, {loss stage: losses})."""
    stages = [Node(case, index) for index in range(case.num_stages)]
    inputs, targets = batch(case)
    losses = {stage: [] for stage in case.loss_stages}
    for microbatch, value in enumerate(inputs):
        outputs = []
        for index, stage in enumerate(stages):
            sources = case.sources_of(index)
            # Every consumer has its own copy, which it may write to.
            taken = [outputs[source].clone() for source in sources] or [value]
            outputs.append(stage(*taken))
        total = 0.0
        for stage in case.loss_stages:
            loss = loss_fn(outputs[stage], targets[stage][microbatch])
            losses[stage].append(loss.detach())
            total = total + loss / case.num_microbatches
        total.backward()
    return stages, losses


def run_rank(rank, num_ranks, case, in_process):
    """{stage: (calls, {parameter: gradient})} of this process, and its losses by stage."""
    import rrfp

    stages = {
        index: Node(case, index)
        for index in range(case.num_stages)
        if in_process or case.rank_of_stage[index] == rank
    }
    for stage in stages.values():
        stage.sleeps = True
    inputs, targets = batch(case)
    has_targets = [s for s in case.loss_stages if s in stages]
    has_source = any(not case.sources_of(index) for index in stages)
    result = rrfp.run_pipeline(
        list(stages.values()) if in_process else stages,
        inputs if has_source else None,
        {stage: targets[stage] for stage in has_targets} or None,
        loss_fn,
        **case.options(),
    )
    losses = result.losses
    if losses is not None and not isinstance(losses, dict):
        losses = {case.loss_stages[0]: losses}
    found = {
        index: (stage.calls, {name: p.grad for name, p in stage.named_parameters()})
        for index, stage in stages.items()
    }
    return found, losses or {}


def run_case(oracle, case, in_process):
    """Run the case by ``oracle.run_rank`` in its processes, and check it by ``oracle.check``."""
    group = worker_group(1, distributed=False) if in_process else worker_group(case.num_ranks)
    try:
        oracle.check(case, group.values(oracle.run_rank, case, in_process))
    except AssertionError as error:
        raise AssertionError(f"seed {case.seed}, {case}: {error}") from error


def check(case, answers):
    """Compare what the processes answered with the plain loop."""
    stages, losses = plain_loop(case)
    found = {index: entry for part, _ in answers for index, entry in part.items()}
    told = {stage: table for _, part in answers for stage, table in part.items()}
    assert sorted(found) == list(range(case.num_stages))
    assert sorted(told) == sorted(case.loss_stages)
    bound = 1e-10 if case.dtype == "float64" else 1e-5
    for stage, table in losses.items():
        for ours, theirs in zip(told[stage], table, strict=True):
            assert abs(ours - theirs) <= bound * max(1.0, abs(theirs)), f"loss of stage {stage}"
    for index, (calls, gradients) in found.items():
        assert calls == case.num_microbatches
        for name, parameter in stages[index].named_parameters():
            want, got = parameter.grad, gradients[name]
            assert (want is None) == (got is None), f"{name} of stage {index}"
            if want is not None:
                error = (got - want).norm() / want.norm().clamp_min(1e-12)
                assert error <= bound, f"{name} of stage {index} is off by {error:.2e}"
