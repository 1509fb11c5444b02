"""Every pair of features at once: seeded cases, each with about half of them, beside a plain loop.

Would catch: a feature that forgets another. All in float64, so that nothing hides in rounding.
``docs/features.py`` writes the matrix of the documentation from the tables here.
"""

import itertools
import random

from feature_stages import (
    NUM_STAGES,
    SEED,
    Stage,
    batch_of,
    edges_of,
    factors,
    hidden_of,
    kwargs_of,
    loss_stages_of,
    modes_of,
    num_steps,
    sources_of,
    squared_error,
)

# name -> what the matrix calls it. Each is on or off in a case.
FEATURES = {
    "split": "`split_backward`",
    "products": "`split_backward` and `add_in_products`",
    "deterministic": "`deterministic`",
    "fixed": "a fixed order, `slack=0`",
    "bytes": "`max_in_flight` in bytes, given",
    "measured": "`max_in_flight` in bytes, measured",
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
    "evaluate": "`forward_only`, a step between",
    "batch_norm": "batch norm",
    "few": "fewer microbatches than ranks",
    "chunks": "several stages per rank",
    "skip": "a skip edge",
    "graph": "two sources, a join, two losses",
    "tied": "tied parameters",
    "trees": "trees at the boundaries",
    "shapes": "shapes that differ",
    "autocast": "autocast",
    "hooks": "saved-tensor hooks of the caller",
    "compile": "`torch.compile` (threads)",
    "tcp": "TCP (processes)",
    "group": "an agreement group (processes)",
}
REFUSED = {
    ("products", "deterministic"): "rounds otherwise than a plain loop",
    ("fixed", "bytes"): "with slack 0 no forward can be held back",
    ("fixed", "measured"): "with slack 0 no forward can be held back",
    ("measured", "group"): "members of an agreement group cannot measure alike",
}
ALTERNATIVES = {("bytes", "measured")}  # two forms of one thing
# What costs most is on in fewer cases.
_WEIGHTS = {"group": 0.25, "compile": 0.15, "tcp": 0.4}


def are_apart(a, b):
    """Whether two features cannot stand in one case."""
    return any({a, b} == set(pair) for pair in (*REFUSED, *ALTERNATIVES))


def _draw(rng):
    """Features that may stand together."""
    chosen = [name for name in FEATURES if rng.random() < _WEIGHTS.get(name, 0.5)]
    rng.shuffle(chosen)
    on = []
    for name in chosen:
        if not any(are_apart(name, other) for other in on):
            on.append(name)
    return frozenset(on)


def cover(seed):
    """(seed, features) of cases in which every allowed pair stands together, and every feature
    is off in some."""
    rng = random.Random(seed)
    left = {frozenset(pair) for pair in itertools.combinations(FEATURES, 2)
            if not are_apart(*pair)}
    cases = []
    while left:
        drawn = [_draw(rng) for _ in range(200)]
        best = max(drawn, key=lambda on: sum(pair <= on for pair in left))
        found = {pair for pair in left if pair <= best}
        if not found:  # few are left: begin with one of them
            best = min(left, key=sorted)
            found = {best}
        left -= found
        cases.append((rng.randrange(10**6), best))
    for name in FEATURES:
        if all(name in on for _, on in cases):
            cases.append((rng.randrange(10**6), _draw(rng) - {name}))
    return cases


def num_ranks_of(on):
    """Ranks of a pipeline; the members of an agreement group are two pipelines of two ranks."""
    return 2 if on & {"chunks", "group"} else NUM_STAGES


def pipeline_options(on):
    options = {"edges": edges_of(on) if on & {"skip", "graph"} else None}
    if "graph" in on:
        options["loss_stages"] = loss_stages_of(on)
    if "tied" in on:
        options["tied"] = [(0, "mix.weight"), (NUM_STAGES - 1, "mix.weight")]
    return options


def step_options(on, rows, num_ranks):
    options = {"seed": SEED, "stall_timeout_s": 30.0, "deterministic": "deterministic" in on,
               "split_backward": True if on & {"split", "products"} else None,
               "add_in_products": "products" in on,
               "loss_reduction": factors(on, rows)[0] if "weights" in on else "mean",
               "grad_scale": 8.0 if "scale" in on else None,
               "return_outputs": "outputs" in on, "broadcast_loss": "broadcast" in on}
    chunks = NUM_STAGES // num_ranks
    if "fixed" in on:
        options |= {"hint": "gpipe", "slack": 0}
    if "list" in on:
        least = chunks * len(rows) if "fixed" in on else 2 * chunks
        options["max_in_flight"] = [least + r for r in range(num_ranks)]
    if on & {"bytes", "measured"}:
        few = ["1.5kB"] * num_ranks
        if "list" in on:
            few[0] = 2 * chunks
        options["max_in_flight"] = few if "list" in on else "1.5kB"
    if "bytes" in on:
        options["activation_bytes"] = 700
    if "mid" in on:
        options |= {"microbatch_order": "mid", "costs": rows}
    return options


_meshes = []


def _mesh():
    """Two pipelines of two ranks; the same one for all cases of a process."""
    if not _meshes:
        from torch.distributed.device_mesh import init_device_mesh

        _meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))
    return _meshes[0]


def open_pipeline(rank, num_processes, on):
    """(pipeline, {stage: module} of this process); num_processes 1: all ranks are threads, else
    there are four."""
    import rrfp

    num_ranks, options, meets = num_ranks_of(on), pipeline_options(on), None
    if num_processes > 1:
        options["transport"] = "tcp" if "tcp" in on else "auto"
        if num_ranks == 2:
            rank //= 2
            options["group"] = _mesh()
        if "group" in on:
            meets = _mesh()["tp"].get_group()
            options["agreement_group"] = "auto"
    owned = [s for s in range(NUM_STAGES) if num_processes == 1 or s % num_ranks == rank]
    stages = {s: Stage(s, on, rrfp.aux_loss, meets, compiles=num_processes == 1) for s in owned}
    if num_processes == 1:
        return rrfp.Pipeline(list(stages.values()), num_ranks=num_ranks, **options), stages
    return rrfp.Pipeline(stages, **options), stages


def by_stage(values, on):
    """{loss stage: list} of what a step returned."""
    if values is None or isinstance(values, dict):
        return values or {}
    return {loss_stages_of(on)[0]: values}


def run(rank, num_processes, case):
    """What a process does: its stages, losses of all steps, outputs, metrics, gradients; None
    where a pipeline of two ranks leaves it nothing to do."""
    _, on = case
    if num_processes > 1 and num_ranks_of(on) == 2 and "group" not in on:
        _mesh()  # every process takes part in making it
        if rank % 2:
            return None
    losses, metrics, packed, result = [], [], [], None

    def loss_fn(output, target):
        loss = squared_error(output, target)
        return (loss, {"rows": len(target)}) if "metrics" in on else loss

    pipeline, stages = open_pipeline(rank, num_processes, on)
    with pipeline, modes_of(on, packed):
        for step in range(num_steps(on)):
            inputs, targets, rows = batch_of(case, step)
            options = step_options(on, rows, num_ranks_of(on))
            kwargs = kwargs_of(on, rows)
            options["stage_kwargs"] = {2: kwargs} if kwargs and 2 in stages else None
            for is_eval in (False, True)[: 2 if "evaluate" in on else 1]:
                given = [inputs if set(sources_of(on)) & set(stages) else None,
                         targets if set(loss_stages_of(on)) & set(stages) else None]
                if "iterators" in on:
                    given = [None if g is None else iter(g) for g in given]
                    options["num_microbatches"] = len(rows)
                for stage in stages.values():
                    stage.train(not is_eval)
                call = pipeline.eval_step if is_eval else pipeline.step
                before = len(packed)
                returned = call(*given, loss_fn, **options)
                losses.append({s: [x.item() for x in of_stage]
                               for s, of_stage in by_stage(returned.losses, on).items()})
                if not is_eval:
                    result = returned
                    metrics.append((by_stage(result.metrics, on), rows))
                    trains = any(p.requires_grad for s in stages.values() for p in s.parameters())
                    assert len(packed) > before or not trains or "hooks" not in on
    outputs = {s: [hidden_of(o).numpy() for o in of_stage]
               for s, of_stage in by_stage(result.outputs, on).items()}
    gradients = {f"{s}.{name}": None if p.grad is None else p.grad.numpy()
                 for s, stage in stages.items() for name, p in stage.named_parameters()}
    return list(stages), losses, outputs, metrics, gradients
