"""Random graphs in which some parameters of the stages are tied; their plain loop shares them.

As in ``graph_parity``, whose cases these extend, all is a function of the seed.
"""

import random

import graph_parity
import torch

NAMES = ("scale", "maps.0.weight")
STEPS = 2


def groups_of(case):
    """One or two groups of holders. Two parameters of a stage never meet in a group."""
    rng = random.Random(case.seed * 13 + 5)
    stages = [s for s in range(case.num_stages) if s not in case.frozen]
    names = rng.sample(NAMES, rng.choice([1, 2]))
    return [
        [(stage, name) for stage in rng.sample(stages, rng.randint(2, len(stages)))]
        for name in names if len(stages) > 1
    ]


def make_stages(case):
    """All stages; copies of a tied parameter have equal values, as a user gives them."""
    stages = [graph_parity.Node(case, index) for index in range(case.num_stages)]
    for group in groups_of(case):
        first = stages[min(group)[0]].get_parameter(group[0][1])
        for stage, name in group:
            with torch.no_grad():
                stages[stage].get_parameter(name).copy_(first)
    return stages


def share(stages, groups):
    """Make each group one parameter."""
    for group in groups:
        first = stages[group[0][0]].get_parameter(group[0][1])
        for stage, name in group:
            owner, _, last = name.rpartition(".")
            setattr(stages[stage].get_submodule(owner), last, first)


def plain_loop(case):
    """(stages with gradients, {loss stage: losses of the last step})."""
    stages = make_stages(case)
    share(stages, groups_of(case))
    inputs, targets = graph_parity.batch(case)
    for _ in range(STEPS):
        losses = {stage: [] for stage in case.loss_stages}
        for microbatch, value in enumerate(inputs):
            outputs = []
            for index, stage in enumerate(stages):
                taken = [outputs[source].clone() for source in case.sources_of(index)] or [value]
                outputs.append(stage(*taken))
            total = 0.0
            for stage in case.loss_stages:
                loss = graph_parity.loss_fn(outputs[stage], targets[stage][microbatch])
                losses[stage].append(loss.detach())
                total = total + loss / case.num_microbatches
            total.backward()
    return stages, losses


def run_rank(rank, num_ranks, case, in_process):
    """As ``graph_parity.run_rank``: gradients after two steps that accumulate."""
    import rrfp

    stages = {
        index: stage for index, stage in enumerate(make_stages(case))
        if in_process or case.rank_of_stage[index] == rank
    }
    for stage in stages.values():
        stage.sleeps = True
    inputs, targets = graph_parity.batch(case)
    has_targets = [s for s in case.loss_stages if s in stages]
    has_source = any(not case.sources_of(index) for index in stages)
    for _ in range(STEPS):
        result = rrfp.run_pipeline(
            list(stages.values()) if in_process else stages,
            inputs if has_source else None,
            {stage: targets[stage] for stage in has_targets} or None,
            graph_parity.loss_fn,
            tied=groups_of(case),
            **case.options(),
        )
    losses = result.losses
    if losses is not None and not isinstance(losses, dict):
        losses = {case.loss_stages[0]: losses}
    gradients = {
        index: {name: p.grad for name, p in stage.named_parameters()}
        for index, stage in stages.items()
    }
    return gradients, losses or {}


def check(case, answers):
    """Every copy has the gradient of the one shared parameter."""
    stages, losses = plain_loop(case)
    found = {index: entry for part, _ in answers for index, entry in part.items()}
    told = {stage: table for _, part in answers for stage, table in part.items()}
    bound = 1e-10 if case.dtype == "float64" else 1e-5
    for stage, table in losses.items():
        for ours, theirs in zip(told[stage], table, strict=True):
            assert abs(ours - theirs) <= bound * max(1.0, abs(theirs)), f"loss of stage {stage}"
    for index, gradients in found.items():
        for name, got in gradients.items():
            want = stages[index].get_parameter(name).grad
            assert (want is None) == (got is None), f"{name} of stage {index}"
            if want is not None:
                error = (got - want).norm() / want.norm().clamp_min(1e-12)
                assert error <= bound, f"{name} of stage {index} is off by {error:.2e}"
    for group in groups_of(case):
        first = found[group[0][0]][group[0][1]]
        for stage, name in group[1:]:
            assert first is None or torch.equal(first, found[stage][name]), "copies differ"
