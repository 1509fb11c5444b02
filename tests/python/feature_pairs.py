"""Every pair of features at once: seeded cases, each with about half of them, beside a plain loop.

Would catch: a feature that forgets another. All in float64, so that nothing hides in rounding.
``docs/features.py`` writes the matrix of the documentation from the tables here.
"""

import contextlib
import itertools
import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_STAGES, WIDTH, SEED = 4, 4, 11

# name -> what the matrix calls it. Each is on or off in a case.
FEATURES = {
    "split": "`split_backward`",
    "deterministic": "`deterministic`",
    "fixed": "a fixed order, `slack=0`",
    "bytes": "`max_in_flight` in bytes",
    "list": "`max_in_flight` per rank",
    "mid": '`microbatch_order="mid"`',
    "weights": "token-weighted losses",
    "scale": "`grad_scale`",
    "iterators": "iterators as microbatches",
    "metrics": "`loss_fn` with metrics",
    "broadcast": "`broadcast_loss`",
    "outputs": "`return_outputs`",
    "kwargs": "`stage_kwargs`",
    "auxiliary": "`aux_loss`",
    "dropout": "dropout",
    "checkpoint": "activation checkpointing",
    "frozen": "a frozen stage",
    "accumulate": "gradients over two steps",
    "evaluate": "an eval step between",
    "batch_norm": "batch norm",
    "few": "fewer microbatches than ranks",
    "chunks": "several stages per rank",
    "skip": "a skip edge",
    "tied": "tied parameters",
    "trees": "trees at the boundaries",
    "shapes": "shapes that differ",
    "tcp": "TCP between processes",
}
REFUSED = {("fixed", "bytes"): "with slack 0 no forward can be held back"}


def cover(seed):
    """(seed, features) of cases in which every allowed pair stands together, and every feature
    is off in some."""
    rng = random.Random(seed)
    left = {frozenset(pair) for pair in itertools.combinations(FEATURES, 2)}
    left -= {frozenset(pair) for pair in REFUSED}
    cases = []
    while left:
        best, gain = None, -1
        for _ in range(60):
            chosen = set(rng.sample(list(FEATURES), len(FEATURES) // 2))
            for pair in REFUSED:
                if chosen.issuperset(pair):
                    chosen.discard(rng.choice(pair))
            found = sum(pair <= chosen for pair in left)
            if found > gain:
                best, gain = chosen, found
        left = {pair for pair in left if not pair <= best}
        cases.append((rng.randrange(10**6), frozenset(best)))
    return cases


class Stage(nn.Module):
    """``add_loss`` takes an auxiliary loss: rrfp's function, or a list's append."""

    def __init__(self, index, on, add_loss):
        super().__init__()
        generator = torch.Generator().manual_seed(SEED + index)
        self.index, self.on, self.add_loss = index, on, add_loss
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.mix.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
            if "tied" in on and index == NUM_STAGES - 1:  # a copy of the first stage's
                first = torch.Generator().manual_seed(SEED)
                self.mix.weight.copy_(torch.randn(WIDTH, WIDTH, generator=first) * 0.6)
        self.norm = None
        if "batch_norm" in on:  # a mean over all forwards: their order is nobody's promise
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None, dtype=torch.float64)
        if "frozen" in on and index == 1:
            self.requires_grad_(False)

    def body(self, hidden):
        hidden = torch.tanh(self.mix(hidden))
        if self.norm is not None:
            hidden = self.norm(hidden)
        if "dropout" in self.on:
            hidden = nn.functional.dropout(hidden, 0.3, self.training)
        return hidden

    def forward(self, *values, gain=1.0):
        plain = [value["h"] if isinstance(value, dict) else value for value in values]
        hidden = sum(plain) * gain
        if "checkpoint" in self.on:
            hidden = checkpoint(self.body, hidden, use_reentrant=False)
        else:
            hidden = self.body(hidden)
        if "auxiliary" in self.on and self.index == 2 and torch.is_grad_enabled():
            self.add_loss(0.1 * hidden.square().mean())
        if "trees" not in self.on:
            return hidden
        return {"h": hidden, "none": None, "tag": torch.tensor([self.index])}


def squared_error(output, target):
    hidden = output["h"] if isinstance(output, dict) else output
    return (hidden - target).square().mean()


def edges_of(on):
    chain = [(s, s + 1) for s in range(NUM_STAGES - 1)]
    return [*chain, (0, 2)] if "skip" in on else chain


def batch_of(case, step):
    seed, on = case
    rng = random.Random(seed + step)
    count = 1 if "few" in on else 6
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
    return 2 if "accumulate" in on else 1


def reference(case):
    """Losses by step (eval steps too), outputs of the last, gradients by name."""
    import rrfp

    _, on = case
    auxiliary = []
    stages = [Stage(s, on, auxiliary.append) for s in range(NUM_STAGES)]
    counter, losses, outputs = 0, [], None

    def forward(step, microbatch, value, kwargs):
        values = {}
        for index, stage in enumerate(stages):
            sources = [a for a, b in edges_of(on) if b == index]
            given = [values[a] for a in sources] or [value]
            keywords = kwargs[microbatch] if kwargs and index == 2 else {}
            with rrfp.task_rng(SEED, step, index, microbatch):
                values[index] = stage(*given, **keywords)
        return values[NUM_STAGES - 1]

    for step in range(num_steps(on)):
        inputs, targets, rows = batch_of(case, step)
        kwargs = kwargs_of(on, rows)
        order = range(len(rows))
        if "mid" in on:
            ranked = sorted(order, key=lambda m: (rows[m], m))
            order = ranked[0::2] + ranked[1::2][::-1]
        found, outputs = [None] * len(rows), [None] * len(rows)
        for m in order:
            auxiliary.clear()
            output = forward(counter, m, inputs[m], kwargs)
            loss = squared_error(output, targets[m])
            (sum(auxiliary, loss) * factors(on, rows)[1][m]).backward()
            found[m], outputs[m] = loss.item(), (
                output["h"] if isinstance(output, dict) else output).detach()
        losses.append(found)
        counter += 1
        if "evaluate" in on:
            for stage in stages:
                stage.eval()
            with torch.no_grad():
                losses.append([squared_error(forward(counter, m, inputs[m], kwargs),
                                             targets[m]).item() for m in range(len(rows))])
            for stage in stages:
                stage.train()
            counter += 1
    gradients = {f"{s}.{name}": p.grad for s, stage in enumerate(stages)
                 for name, p in stage.named_parameters()}
    if "tied" in on:
        total = gradients["0.mix.weight"] + gradients["3.mix.weight"]
        gradients["0.mix.weight"] = gradients["3.mix.weight"] = total
    return losses, outputs, gradients


def pipeline_options(on):
    """(arguments of Pipeline, number of ranks)."""
    num_ranks = 2 if "chunks" in on else NUM_STAGES
    options = {"edges": edges_of(on) if "skip" in on else None}
    if "tied" in on:
        options["tied"] = [(0, "mix.weight"), (NUM_STAGES - 1, "mix.weight")]
    return options, num_ranks


def step_options(on, rows, num_ranks):
    options = {"seed": SEED, "stall_timeout_s": 30.0, "deterministic": "deterministic" in on,
               "split_backward": True if "split" in on else None,
               "loss_reduction": factors(on, rows)[0] if "weights" in on else "mean",
               "grad_scale": 8.0 if "scale" in on else None,
               "return_outputs": "outputs" in on, "broadcast_loss": "broadcast" in on}
    chunks = NUM_STAGES // num_ranks
    if "fixed" in on:
        options |= {"hint": "gpipe", "slack": 0}
    if "list" in on:
        least = chunks * len(rows) if "fixed" in on else 2 * chunks
        options["max_in_flight"] = [least + r for r in range(num_ranks)]
    if "bytes" in on:
        few = ["1.5kB"] * num_ranks
        if "list" in on:
            few[0] = 2 * chunks
        options |= {"max_in_flight": few if "list" in on else "1.5kB", "activation_bytes": 700}
    if "mid" in on:
        options |= {"microbatch_order": "mid", "costs": rows}
    return options


def run(rank, num_processes, case):
    """What a process does; num_processes 1: all ranks are threads of it."""
    import rrfp

    _, on = case
    pipeline_arguments, num_ranks = pipeline_options(on)
    owned = range(NUM_STAGES)
    if num_processes > 1:
        owned = [s for s in owned if s % num_ranks == rank]
    stages = {s: Stage(s, on, rrfp.aux_loss) for s in owned}
    has_source, has_loss = 0 in owned, NUM_STAGES - 1 in owned
    losses, metrics, result = [], [], None

    def loss_fn(output, target):
        loss = squared_error(output, target)
        return (loss, {"rows": len(target)}) if "metrics" in on else loss

    with contextlib.ExitStack() as stack:
        if num_processes == 1:
            pipeline = rrfp.Pipeline(list(stages.values()), num_ranks=num_ranks,
                                     **pipeline_arguments)
        else:
            transport = "tcp" if "tcp" in on else "auto"
            pipeline = rrfp.Pipeline(stages, transport=transport, **pipeline_arguments)
        stack.enter_context(pipeline)
        for step in range(num_steps(on)):
            inputs, targets, rows = batch_of(case, step)
            options = step_options(on, rows, num_ranks)
            kwargs = kwargs_of(on, rows)
            options["stage_kwargs"] = {2: kwargs} if kwargs and 2 in owned else None
            for is_eval in (False, True)[: 2 if "evaluate" in on else 1]:
                given = [inputs if has_source else None, targets if has_loss else None]
                if "iterators" in on:
                    given = [None if g is None else iter(g) for g in given]
                    options["num_microbatches"] = len(rows)
                for stage in stages.values():
                    stage.train(not is_eval)
                call = pipeline.eval_step if is_eval else pipeline.step
                result_of_step = call(*given, loss_fn, **options)
                found = result_of_step.losses
                losses.append(None if found is None else [x.item() for x in found])
                if not is_eval:
                    result = result_of_step
                    metrics.append((result.metrics, rows))
    outputs = result.outputs
    if outputs is not None:
        outputs = [(o["h"] if isinstance(o, dict) else o).numpy() for o in outputs]
    gradients = {f"{s}.{name}": None if p.grad is None else p.grad.numpy()
                 for s, stage in stages.items() for name, p in stage.named_parameters()}
    return losses, outputs, metrics, gradients
