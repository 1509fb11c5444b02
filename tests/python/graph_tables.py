"""Random graphs whose stages are given everything a step can give: inputs by source, keyword
arguments, weights, a scale, an order of microbatches, auxiliary losses; and their plain loop.

As in ``graph_parity``, whose cases these extend, all is a function of the seed.
"""

import random

import graph_parity
import torch


class Tables:
    """What a case gives to its stages and asks of the step."""

    def __init__(self, case):
        self.case = case
        rng = random.Random(case.seed * 7 + 1)
        generator = torch.Generator().manual_seed(case.seed)
        num_microbatches = case.num_microbatches
        sizes = [rng.randint(1, 4) for _ in range(num_microbatches)]
        dtype = getattr(torch, case.dtype)

        def values():
            return [torch.randn(size, graph_parity.WIDTH, generator=generator).to(dtype)
                    for size in sizes]

        self.inputs = {s: values() for s in range(case.num_stages) if not case.sources_of(s)}
        self.targets = {s: values() for s in case.loss_stages}
        self.kwargs = {s: [{"gain": rng.uniform(0.5, 1.5)} for _ in range(num_microbatches)]
                       for s in range(case.num_stages) if rng.random() < 0.4}
        self.weights = rng.choice(["mean", "sum", [rng.uniform(0.1, 1) for _ in sizes]])
        self.grad_scale = rng.choice([None, 4.0])
        self.costs = [float(size) for size in sizes]
        self.order = rng.choice(["given", "mid", rng.sample(range(num_microbatches),
                                                            num_microbatches)])

    def options(self):
        return {**self.case.options(), "loss_reduction": self.weights,
                "grad_scale": self.grad_scale, "costs": self.costs,
                "microbatch_order": self.order, "return_outputs": True}

    def factors(self):
        num_microbatches = self.case.num_microbatches
        weights = {"mean": [1 / num_microbatches] * num_microbatches,
                   "sum": [1.0] * num_microbatches}.get(str(self.weights), self.weights)
        return [weight * (self.grad_scale or 1.0) for weight in weights]


class FullNode(graph_parity.Node):
    """A node with a keyword argument; some add two auxiliary losses."""

    def __init__(self, case, index):
        super().__init__(case, index)
        self.adds = (case.seed + index) % 3 == 0
        self.added = None  # a plain loop collects here

    def forward(self, *inputs, gain=1.0):
        import rrfp

        output = super().forward(*inputs) * gain
        if self.adds:
            # Of a copy: a consumer may write into what it receives, and in one process that is
            # the output itself.
            seen = output.clone()
            for value in (0.1 * seen.square().mean(), seen[0, 0]):
                rrfp.aux_loss(value) if self.added is None else self.added.append(value)
        return output


def plain_loop(case):
    """(stages with gradients, {loss stage: losses}, {loss stage: outputs})."""
    tables = Tables(case)
    stages = [FullNode(case, index) for index in range(case.num_stages)]
    losses = {stage: [] for stage in case.loss_stages}
    kept = {stage: [] for stage in case.loss_stages}
    for microbatch, factor in enumerate(tables.factors()):
        outputs, added = [], []
        for index, stage in enumerate(stages):
            sources = case.sources_of(index)
            taken = [outputs[source].clone() for source in sources]
            kwargs = tables.kwargs[index][microbatch] if index in tables.kwargs else {}
            stage.added = added
            outputs.append(stage(*(taken or [tables.inputs[index][microbatch]]), **kwargs))
        total = sum(value for value in added if value.requires_grad)
        for stage in case.loss_stages:
            loss = graph_parity.loss_fn(outputs[stage], tables.targets[stage][microbatch])
            losses[stage].append(loss.detach())
            kept[stage].append(outputs[stage].detach())
            total = total + loss
        (total * factor).backward()
    return stages, losses, kept


def run_rank(rank, num_ranks, case, in_process):
    """({stage: {parameter: gradient}}, losses, outputs) of this process's stages."""
    import rrfp

    tables = Tables(case)
    stages = {index: FullNode(case, index) for index in range(case.num_stages)
              if in_process or case.rank_of_stage[index] == rank}
    for stage in stages.values():
        stage.sleeps = True

    def own(table):
        return {stage: items for stage, items in table.items() if stage in stages} or None

    result = rrfp.run_pipeline(
        list(stages.values()) if in_process else stages,
        own(tables.inputs), own(tables.targets), graph_parity.loss_fn,
        stage_kwargs=own(tables.kwargs), **tables.options(),
    )

    def by_stage(values):
        if values is None:
            return {}
        return values if isinstance(values, dict) else {case.loss_stages[0]: values}

    gradients = {index: {name: p.grad for name, p in stage.named_parameters()}
                 for index, stage in stages.items()}
    return gradients, by_stage(result.losses), by_stage(result.outputs)


def check(case, answers):
    """Compare what the processes answered with the plain loop."""
    stages, *expected = plain_loop(case)
    bound = 1e-10 if case.dtype == "float64" else 1e-5
    found = [{stage: item for answer in answers for stage, item in answer[part].items()}
             for part in range(3)]
    for what, ours, theirs in zip(("loss", "output"), found[1:], expected, strict=True):
        assert sorted(ours) == sorted(theirs), f"{what} of other stages"
        for stage in theirs:
            for m, (got, want) in enumerate(zip(ours[stage], theirs[stage], strict=True)):
                error = (got - want).norm() / want.norm().clamp_min(1)
                assert error <= bound, f"{what} {m} of stage {stage} is off by {error:.2e}"
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            want, got = parameter.grad, found[0][index][name]
            assert (want is None) == (got is None), f"{name} of stage {index}"
            if want is not None:
                error = (got - want).norm() / want.norm().clamp_min(1e-12)
                assert error <= bound, f"{name} of stage {index} is off by {error:.2e}"
