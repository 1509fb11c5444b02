"""Random numbers and gradients that do not depend on timing, to the last bit.

The oracle is a plain loop over the microbatches, stage by stage under ``task_rng``. Stages sleep
at random and messages are late, so that tasks run in many orders; dropout, BatchNorm and both
kinds of activation checkpointing are in the model.
"""

import copy
import os
import random
import time

import parity_late
import pytest
import torch
from parity_group import worker_group
from torch import nn
from torch.utils.checkpoint import checkpoint

import rrfp

SEED = int(os.environ.get("RRFP_SEED", "20260518"))
NUM_RANKS, WIDTH, ROWS, NUM_MICROBATCHES = 4, 8, 5, 6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODES = ["threads", "processes"]


class Body(nn.Module):
    """One stage of a ``kind``; it sleeps at random while ``sleepy`` is a generator."""

    sleepy = None

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH) if kind == "batch_norm" else nn.LayerNorm(WIDTH),
            nn.Dropout(0.3),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.2),
        )

    def forward(self, x):
        if Body.sleepy is not None:
            time.sleep(Body.sleepy.choice((0, 0, 0.0005, 0.002)))
        if self.kind in ("checkpoint", "reentrant"):
            return checkpoint(self.layers, x, use_reentrant=self.kind == "reentrant")
        return self.layers(x)


def loss_of(output, target):
    return (output - target).square().mean()


def make_stages(seed, dtype, kinds):
    torch.manual_seed(seed)
    return [Body(kind).to(dtype) for kind in kinds]


def make_batch(seed, step, dtype):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    draw = [torch.randn(2, ROWS, WIDTH, generator=generator).to(dtype)
            for _ in range(NUM_MICROBATCHES)]
    return [pair[0] for pair in draw], [pair[1] for pair in draw]


def plain_step(stages, inputs, targets, seed, step, order=None):
    for microbatch in order or range(len(inputs)):
        value = inputs[microbatch]
        for index, stage in enumerate(stages):
            with rrfp.task_rng(seed, step, index, microbatch):
                value = stage(value)
        (loss_of(value, targets[microbatch]) * (1 / len(inputs))).backward()


def tensors_of(stages, owned):
    """Gradients and buffers of the stages, by name."""
    found = {}
    for index in owned:
        for name, parameter in stages[index].named_parameters():
            found[f"{index}.{name}.grad"] = parameter.grad
        for name, buffer in stages[index].named_buffers():
            found[f"{index}.{name}"] = buffer
    return found


def run_rank(rank, num_ranks, mode, seed, num_steps, dtype_name, kinds, options, exact):
    """Steps of one pipeline with random delays, each compared with the plain loop."""
    dtype = DTYPES[dtype_name]
    everything = make_stages(seed, dtype, kinds)
    plain = copy.deepcopy(everything)
    threads = mode == "threads"
    owned = range(NUM_RANKS) if threads else [rank]
    own = everything if threads else {rank: everything[rank]}
    orders, fused = set(), {}
    with parity_late.late_runtimes(seed, late_s=0.003), rrfp.Pipeline(own) as pipeline:
        for step in range(num_steps):
            inputs, targets = make_batch(seed, step, dtype)
            state, python_state = torch.get_rng_state(), random.getstate()
            Body.sleepy = random.Random(f"{seed} {step} {rank}")
            result = pipeline.step(
                inputs if 0 in owned else None,
                targets if NUM_RANKS - 1 in owned else None,
                loss_of, seed=seed, stall_timeout_s=30.0, **options,
            )
            Body.sleepy = None
            assert torch.equal(state, torch.get_rng_state()), "torch's generator has moved"
            assert python_state == random.getstate()
            plain_step(plain, inputs, targets, seed, step, options.get("microbatch_order"))
            want = tensors_of(plain, owned)
            for name, got in tensors_of(everything, owned).items():
                where = f"{name} in step {step} of seed {seed}"
                if exact:
                    assert torch.equal(got, want[name]), where
                elif name.endswith(".grad"):
                    assert torch.allclose(got, want[name], rtol=1e-4, atol=1e-6), where
            for stages in (everything, plain):
                for stage in stages:
                    stage.zero_grad()
            orders |= {" ".join(ranked.order) for ranked in result.report.ranks}
            fused.update(result.report.fused)
    return {"orders": len(orders), "fused": fused}


def run(mode, *args):
    group = worker_group(1, False) if mode == "threads" else worker_group(NUM_RANKS)
    return group.values(run_rank, mode, *args)


KINDS = {
    "mixed": ("plain", "batch_norm", "checkpoint", "plain"),
    "reentrant": ("batch_norm", "plain", "reentrant", "plain"),
}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_deterministic_steps_have_the_bits_of_a_plain_loop(mode, dtype, kinds):
    """30 shuffled steps per case, over 200 in all; each is another order of arrival."""
    answers = run(mode, SEED % 1000, 30, dtype, KINDS[kinds], {"deterministic": True}, True)
    assert sum(answer["orders"] for answer in answers) > 30, "hardly anything was shuffled"
    fused = {stage for answer in answers for stage in answer["fused"]}
    assert fused == {2}


@pytest.mark.parametrize(
    "options",
    [
        {"split_backward": False},
        {"hint": "bfw", "max_in_flight": 2},
        {"hint": "gpipe", "slack": 0},
        {"hint": "1f1b", "slack": 3, "microbatch_order": [3, 0, 5, 1, 4, 2]},
    ],
    ids=["full", "bfw", "fixed", "listed"],
)
@pytest.mark.parametrize("mode", MODES)
def test_deterministic_under_other_hints(mode, options):
    options = {"deterministic": True, **options}
    run(mode, SEED % 1000 + 1, 6, "float32", KINDS["mixed"], options, True)


@pytest.mark.parametrize("options", [{}, {"hint": "zb-h1"}], ids=["auto", "zb-h1"])
@pytest.mark.parametrize("mode", MODES)
def test_masks_do_not_depend_on_the_order_of_execution(mode, options):
    """Without ``deterministic`` sums may differ in their last bits, masks may not."""
    kinds = ("plain", "reentrant", "checkpoint", "plain")
    run(mode, SEED % 1000 + 2, 8, "float32", kinds, options, False)
