"""Models that break naive pipelines, each against the plain loop, in one process and across
processes.

Would catch: a view rebuilt with the wrong strides, a gradient lost or invented (None), an
in-place write seen by the wrong side, a tree flattened to something else, a shape remembered
from another microbatch.
"""

import parity_autograd
import parity_model as model
import parity_scenarios
import pytest
from parity_group import worker_group

import rrfp

SCENARIOS = {**parity_scenarios.SCENARIOS, **parity_autograd.SCENARIOS}
SETTINGS = {
    "default": {},
    "fixed": {"hint": "1f1b", "slack": 0},
    "gpipe": {"hint": "gpipe", "max_in_flight": 64},
    "tight": {"hint": "b-priority", "max_in_flight": 1},
    "split": {"hint": "bfw"},
    "ordered": {"deterministic": True},
}


def run_rank(rank, num_ranks, name, mode, setting):
    """Gradients, parameter names and losses of what this process owns."""
    built = SCENARIOS[name](11)
    count = len(built.stages)
    owned = range(count) if mode == "threads" else [rank]
    stages = built.stages if mode == "threads" else {rank: built.stages[rank]}
    kwargs = built.stage_kwargs and {s: k for s, k in built.stage_kwargs.items() if s in owned}
    losses = []
    for inputs, targets in built.steps:
        result = rrfp.run_pipeline(
            stages,
            inputs if 0 in owned else None,
            targets if count - 1 in owned else None,
            built.loss_fn,
            stage_kwargs=kwargs or None,
            loss_reduction="sum",
            stall_timeout_s=30.0,
            **SETTINGS[setting],
        )
        losses.append(result.losses and [loss.double().item() for loss in result.losses])
    gradients = {
        f"{s}.{n}": None if p.grad is None else (p.grad.double().numpy(), str(p.grad.dtype))
        for s in owned
        for n, p in built.stages[s].named_parameters()
    }
    return gradients, losses


def reference(name):
    built = SCENARIOS[name](11)
    losses = []
    for inputs, targets in built.steps:
        raw = []
        for m, (value, target) in enumerate(zip(inputs, targets, strict=True)):
            for s, stage in enumerate(built.stages):
                kwargs = built.stage_kwargs[s][m] if s in (built.stage_kwargs or {}) else {}
                args = value if isinstance(value, tuple) else (value,)
                value = stage(*args, **kwargs)
            loss = built.loss_fn(value, target)
            loss.backward()
            raw.append(loss.double().item())
        losses.append(raw)
    gradients = {
        f"{s}.{n}": p.grad for s, m in enumerate(built.stages) for n, p in m.named_parameters()
    }
    return gradients, losses, built.tolerance


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_model(name, mode, setting):
    expected, losses, tolerance = reference(name)
    if mode == "threads":
        group = worker_group(1, distributed=False)
    else:
        group = worker_group(len(SCENARIOS[name](11).stages))
    answers = group.values(run_rank, name, mode, setting)
    got = {key: value for gradients, _ in answers for key, value in gradients.items()}
    assert got.keys() == expected.keys()
    for key, gradient in expected.items():
        if gradient is None or got[key] is None:
            assert got[key] is None and gradient is None, f"{key}: one gradient is None"
            continue
        values, dtype = got[key]
        assert dtype == str(gradient.dtype)
        error = model.gradient_error(values, gradient.double())
        assert error <= tolerance, f"gradient of {key} is off by {error:.3g}"
    for step, raw in enumerate(losses):
        assert answers[-1][1][step] == pytest.approx(raw, rel=max(tolerance, 1e-10))
