"""Data parallel times pipeline: two pipelines of two ranks, gloo, real collectives.

Would catch: a wrapper whose gradients stay one replica's own without a sign, gathered parameters
that are gone when a backward needs them, a norm that counts replicas or shards twice.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from parity_group import worker_group
from torch import nn

import rrfp

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS, WIDTH, M = 4, 4, 5
LOSS = nn.functional.mse_loss
OPTIONS = {"auto": {}, "split": {"split_backward": True},
           "all in flight": {"hint": "gpipe", "max_in_flight": M},
           "deterministic": {"deterministic": True}}


def load_example():
    spec = importlib.util.spec_from_file_location(
        "data_parallel", ROOT / "examples/03_data_parallel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_meshes = []


def mesh_of():
    from torch.distributed.device_mesh import init_device_mesh

    if not _meshes:
        _meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    return _meshes[0]


def run_example(rank, num_ranks, options):
    """(stage index, its parameters after the example's training) in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        mesh = mesh_of()
        stage = load_example().train(mesh, num_steps=4, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    return mesh["pp"].get_local_rank(), [p.detach().numpy() for p in stage.parameters()]


def trained_plainly():
    """Parameters by stage after the same steps on one device over both batches."""
    example = load_example()
    torch.set_default_dtype(torch.float64)
    try:
        stages = [example.make_stage(rank) for rank in range(2)]
        model = nn.Sequential(*stages)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = map(torch.cat, zip(*(example.batch_of(step, p) for p in range(2))))
            nn.functional.cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return [[p.detach() for p in stage.parameters()] for stage in stages]


@pytest.mark.parametrize("name", OPTIONS)
def test_replicas_that_average_after_the_step_train_as_one(name):
    want = trained_plainly()
    for stage, parameters in worker_group(NUM_RANKS).values(run_example, OPTIONS[name],
                                                                  timeout_s=200):
        for got, expected in zip(parameters, want[stage], strict=True):
            torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-8, atol=1e-10)


def make_stage(index):
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh(),
                         nn.Linear(WIDTH, WIDTH, dtype=torch.float64))


def batch_of(pipeline):
    generator = torch.Generator().manual_seed(pipeline)
    return [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(M)]


def run_sharded(rank, num_ranks, options):
    """(stage, its whole gradients after two steps, the norm of all stages', why it is fused)."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of()
    index, pipeline = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stage = make_stage(index)
    for part in (stage[0], stage[2], stage):
        fully_shard(part, mesh=mesh["dp"])
    batch = batch_of(pipeline)
    with rrfp.Pipeline({index: stage}, group=mesh, agreement_group=mesh["dp"]) as steps:
        for _ in range(2):
            result = steps.step(batch if index == 0 else None, batch if index == 1 else None,
                                LOSS, stall_timeout_s=30.0, **options)
    norm = rrfp.clip_grad_norm_(stage.parameters(), 1e-3, group=mesh["pp"].get_group())
    gradients = [p.grad.full_tensor().numpy() for p in stage.parameters()]
    return index, gradients, norm.item(), result.report.fused.get(index, "")


@pytest.mark.parametrize("name", ["auto", "split", "all in flight", "deterministic"])
def test_fully_sharded_stages_in_an_agreement_group(name):
    stages = [make_stage(index) for index in range(2)]
    model = nn.Sequential(*stages)
    for pipeline in range(2):
        for x in batch_of(pipeline):
            (LOSS(model(x), x) / M).backward()  # two steps, the mean over two replicas
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    answers = worker_group(NUM_RANKS).run(run_sharded, OPTIONS[name], timeout_s=200)
    for answer in answers:
        assert not answer.error_type, answer.error_traceback
        index, gradients, found, fused_because = answer.value
        # Stage 0 has no input gradient, so that its W is the whole backward.
        is_split = name in ("split", "deterministic")
        assert ("fully_shard" in fused_because) == (index == 1 and is_split)
        assert abs(found - norm.item()) < 1e-10
        for got, parameter in zip(gradients, stages[index].parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), parameter.grad, rtol=1e-7,
                                       atol=1e-12)


def run_wrapped(rank, num_ranks, what):
    """What a pipeline says whose stage 1, or a part of it, is wrapped; with every agreement."""
    mesh = mesh_of()
    index = mesh["pp"].get_local_rank()
    stage = make_stage(index)
    replicas = mesh["dp"].get_group()
    if what == "ddp":
        wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(stage, process_group=replicas))
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapped = FullyShardedDataParallel(stage, process_group=replicas,
                                           device_id=torch.device("cpu"))
    texts = []
    for agreement in (None, replicas, "none"):
        try:
            rrfp.Pipeline({index: wrapped if index else make_stage(0)}, group=mesh,
                          agreement_group=agreement).close()
        except ValueError as error:
            texts.append(str(error))
    try:
        rrfp.Pipeline([make_stage(0), wrapped]).close()
    except ValueError as error:
        texts.append(str(error))
    return texts


@pytest.mark.parametrize(("what", "words"), [
    ("ddp", "0 of stage 1 is wrapped in DistributedDataParallel"),
    ("fsdp", "stage 1 is wrapped in FullyShardedDataParallel"),
])
def test_wrappers_that_know_one_backward_are_refused(what, words):
    """DistributedDataParallel gave one replica's gradients for all but the first microbatch."""
    for answer in worker_group(NUM_RANKS).run(run_wrapped, what, timeout_s=200):
        assert not answer.error_type, answer.error_traceback
        assert len(answer.value) == 4
        assert all(words in text and "docs/data_parallel.md" in text for text in answer.value)
