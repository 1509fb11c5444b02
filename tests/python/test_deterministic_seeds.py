"""Deterministic steps have the bits of a plain loop, run after run with a seed of its own.

Weights, data, delays, dtype, split, placement and stages per rank are drawn from the seed. Would
catch: gradients added in the order of arrival in some rare order of tasks.
"""

import copy
import os
import random

import parity_late
import pytest
import test_deterministic as bits
import torch
from parity_group import worker_group

import rrfp

SEED = int(os.environ.get("RRFP_SEED", "20261201"))
NUM_RUNS, RUNS_AT_ONCE, NUM_STEPS = 128, 16, 2
LAYOUTS = {"V 1": (4, "loop"), "V 2 loop": (2, "loop"), "V 2 v": (2, "v")}


def one_run(seed):
    """(dtype, layout, split, orders) of a run; raises AssertionError at the first other bit."""
    rng = random.Random(seed)
    dtype, layout = rng.choice(list(bits.DTYPES)), rng.choice(list(LAYOUTS))
    split = rng.choice([None, False])
    kinds = rng.choices(["plain", "batch_norm", "checkpoint", "reentrant"], [6, 1, 1, 1], k=4)
    if kinds[0] == "reentrant":  # the first input takes no gradient, so its stage would not train
        kinds[0] = "checkpoint"
    num_ranks, placement = LAYOUTS[layout]
    stages = bits.make_stages(seed, bits.DTYPES[dtype], kinds)
    plain, orders = copy.deepcopy(stages), set()
    with (
        parity_late.late_runtimes(seed, late_s=0.003),
        rrfp.Pipeline(stages, num_ranks=num_ranks, placement=placement) as pipeline,
    ):
        for step in range(NUM_STEPS):
            inputs, targets = bits.make_batch(seed, step, bits.DTYPES[dtype])
            bits.Body.sleepy = random.Random(f"{seed} {step}")
            result = pipeline.step(inputs, targets, bits.loss_of, seed=seed, deterministic=True,
                                   split_backward=split, stall_timeout_s=30.0)
            bits.Body.sleepy = None
            bits.plain_step(plain, inputs, targets, seed, step)
            want = bits.tensors_of(plain, range(4))
            for name, got in bits.tensors_of(stages, range(4)).items():
                assert torch.equal(got, want[name]), f"{name}, step {step}, seed {seed}, {layout}"
            orders.add(tuple(tuple(rank.order) for rank in result.report.ranks))
    return dtype, layout, split, orders


def many_runs(rank, num_ranks, first):
    return [one_run(seed) for seed in range(first, first + RUNS_AT_ONCE)]


@pytest.mark.parametrize("first", range(SEED, SEED + NUM_RUNS, RUNS_AT_ONCE))
def test_every_run_has_the_bits_of_its_plain_loop(first):
    (runs,) = worker_group(1, False).values(many_runs, first)
    met = {value for run in runs for value in run[:3]}
    assert met >= {"float32", "bfloat16", None, False} and len(met) >= 6, met
    assert len({order for run in runs for order in run[3]}) > len(runs), "hardly any shuffling"
