"""Stages under torch.compile: gradients, masks and bits are those of the eager plain loop, in
worker threads and between processes; split backwards say that they are fused.
"""

import pytest
import torch
from parity_group import WorkerGroup, worker_group
from torch import nn

import rrfp

NUM_STAGES, NUM_MICROBATCHES, WIDTH, SEED = 3, 5, 8, 7
SETTINGS = {"auto": {}, "bfw": {"hint": "bfw"}, "deterministic": {"deterministic": True}}


def make_stages():
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        for _ in range(NUM_STAGES)
    ]


def loss_of(output, _):
    return output.square().mean()


def plain_gradients(stages, batch, step):
    for microbatch, value in enumerate(batch):
        for index, stage in enumerate(stages):
            with rrfp.task_rng(SEED, step, index, microbatch):
                value = stage(value)
        (loss_of(value, None) / len(batch)).backward()
    return [p.grad for stage in stages for p in stage.parameters()]


def run_rank(rank, num_ranks, mode, backend, setting):
    """The largest error of this process's gradients over two steps, and its fused stages."""
    torch._dynamo.reset()
    compiled = [torch.compile(stage, backend=backend) for stage in make_stages()]
    # Compiled code may draw by other means than eager code, so inductor is compared with itself.
    plain = make_stages()
    if backend == "inductor":
        plain = [torch.compile(stage, backend=backend) for stage in plain]
    owned = range(NUM_STAGES) if mode == "threads" else [rank]
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randn(4, WIDTH, generator=generator) for _ in range(NUM_MICROBATCHES)]
    worst = 0.0
    with rrfp.Pipeline(compiled if mode == "threads" else compiled[rank]) as pipeline:
        for step in range(2):
            result = pipeline.step(
                batch if 0 in owned else None,
                [None] * len(batch) if NUM_STAGES - 1 in owned else None,
                loss_of, seed=SEED, stall_timeout_s=120.0, **SETTINGS[setting],
            )
            want = iter(plain_gradients(plain, batch, step))
            for index, stage in enumerate(compiled):
                for parameter in stage.parameters():
                    expected = next(want)
                    if index in owned:
                        worst = max(worst, (parameter.grad - expected).abs().max().item())
            for stage in (*compiled, *plain):
                stage.zero_grad()
    return worst, result.report.fused


def check(mode, backend, setting):
    if mode == "threads":  # a process of its own, see docs/pitfalls.md
        group = WorkerGroup(1, distributed=False)
        try:
            answers = group.values(run_rank, mode, backend, setting)
        finally:
            group.kill()
    else:
        answers = worker_group(NUM_STAGES).values(run_rank, mode, backend, setting)
    bound = 1e-6 if backend == "inductor" else 0.0
    assert max(worst for worst, _ in answers) <= bound
    fused = {stage: why for _, part in answers for stage, why in part.items()}
    assert set(fused) == (set() if setting == "auto" else {1, 2})  # stage 0 does all of it in W
    assert all("torch.compile" in why for why in fused.values())


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_compiled_stages(mode, setting):
    check(mode, "aot_eager", setting)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_stages_compiled_by_inductor(mode):
    check(mode, "inductor", "deterministic")
