"""Pipelines on GPUs compute what a plain loop computes.

Would catch: a buffer reused while a stream still reads it, a message sent before it was
computed, a stream that does not wait, gradients added twice or not at all.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_model import check_close, gradients_of, loss_fn, make_batch, make_stages, plain_loop

import rrfp

ROOT = Path(__file__).resolve().parents[2]
NUM_GPUS = torch.cuda.device_count() if torch.version.cuda else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")
BUSY_CYCLES = 400_000
LAUNCH_LIMIT_S = 200


def run_here(devices, dtype, seed, steps=3, autocast=False, **options):
    """Several steps in one process, each compared with the plain loop."""
    stages = make_stages(seed, devices, dtype, BUSY_CYCLES)
    reference = make_stages(seed, devices, dtype)
    for step in range(steps):
        inputs, targets = make_batch(seed + step, 9, devices[0], dtype)
        moved = [target.to(devices[-1]) for target in targets]
        for stage in stages:
            stage.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            result = rrfp.run_pipeline(stages, inputs, moved, loss_fn, **options)
        assert all(loss.is_cuda for loss in result.losses)
        losses, gradients = plain_loop(reference, inputs, targets, autocast)
        close = torch.float32 if dtype is torch.float32 and not autocast else torch.bfloat16
        torch.testing.assert_close(
            torch.stack(result.losses).float().cpu(), torch.tensor(losses),
            rtol=1e-4 if close is torch.float32 else 3e-2, atol=1e-4,
        )
        for stage, expected in zip(stages, gradients):
            check_close(gradients_of(stage), expected, close)


@pytest.mark.parametrize("hint", ["auto", "1f1b", "gpipe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_on_one_gpu(num_ranks, dtype, hint, seed):
    run_here(["cuda:0"] * num_ranks, dtype, seed, hint=hint)


@two_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("devices", ["01", "0011", "0101", "10"])
def test_two_gpus_in_one_process(devices, dtype, seed):
    run_here([f"cuda:{d}" for d in devices], dtype, seed)
    assert torch.cuda.current_device() == 0


def test_fixed_order_and_depth_one(seed):
    run_here(["cuda:0"] * 3, torch.float32, seed, hint="1f1b", slack=0, lookahead=1)


def test_autocast(seed):
    run_here(["cuda:0"] * 2, torch.float32, seed, autocast=True)


def test_on_a_stream_of_the_caller(seed):
    with torch.cuda.stream(torch.cuda.Stream()):
        run_here(["cuda:0"] * 2, torch.float32, seed)
        run_here(["cuda:0"], torch.float32, seed)


def test_outputs_and_evaluation(seed):
    stages = make_stages(seed, ["cuda:0"] * 3, torch.float32, BUSY_CYCLES)
    inputs, _ = make_batch(seed, 5, "cuda:0", torch.float32)
    with torch.no_grad():
        expected = []
        for hidden in inputs:
            for stage in stages:
                hidden = stage(hidden)
            expected.append(hidden)
    result = rrfp.run_pipeline(stages, inputs, forward_only=True, return_outputs=True)
    torch.testing.assert_close(result.outputs, expected)


def test_training_with_an_optimizer(seed):
    """The optimizer runs on the caller's stream, the ranks on theirs."""
    ours, theirs = (make_stages(seed, ["cuda:0"] * 4, torch.float32, b) for b in (BUSY_CYCLES, 0))
    optimizers = [
        torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.05)
        for stages in (ours, theirs)
    ]
    for step in range(6):
        inputs, targets = make_batch(seed + step, 6, "cuda:0", torch.float32)
        optimizers[0].zero_grad()
        rrfp.run_pipeline(ours, inputs, targets, loss_fn)
        optimizers[0].step()
        plain_loop(theirs, inputs, targets)
        optimizers[1].step()
    for stage, other in zip(ours, theirs):
        for mine, expected in zip(stage.parameters(), other.parameters()):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_an_exception_ends_the_step_and_the_next_call_works(seed):
    class Failing(torch.nn.Module):
        armed = True

        def forward(self, hidden):
            if self.armed:
                raise RuntimeError("on purpose")
            return hidden * 2

    failing = Failing()
    stages = [*make_stages(seed, ["cuda:0"] * 2, torch.float32, BUSY_CYCLES), failing]
    inputs, targets = make_batch(seed, 6, "cuda:0", torch.float32)
    with pytest.raises(rrfp.StageError, match="on purpose"):
        rrfp.run_pipeline(stages, inputs, targets, loss_fn)
    failing.armed = False
    assert len(rrfp.run_pipeline(stages, inputs, targets, loss_fn).losses) == 6


def test_cpu_beside_gpu_is_refused():
    stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).cuda()]
    with pytest.raises(ValueError, match="stage 0 is on the CPU and stage 1 on a GPU"):
        rrfp.run_pipeline(stages, [torch.ones(2, 4)], [None], lambda out, _: out.sum())


def test_dropout_on_a_shared_gpu_is_refused():
    stages = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1)).cuda()
              for _ in range(2)]
    with pytest.raises(ValueError, match="stage 0 drops out at random and shares cuda:0"):
        rrfp.run_pipeline(stages, [torch.ones(2, 4).cuda()], [None], lambda out, _: out.sum())


def launch(num_ranks, *arguments, **environment):
    """The JSON lines of all ranks of tests/distributed/gpu_rank.py, and all that they printed.

    Started without torchrun, which ends the other ranks as soon as one of them is killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, **environment, "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/distributed/gpu_rank.py"), *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]
    lines, transcript = [], ""
    try:
        deadline = time.monotonic() + LAUNCH_LIMIT_S
        for rank, process in enumerate(processes):
            text, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            lines += [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            transcript += f"rank {rank}: exit {process.returncode}\n{text[-4000:]}\n"
    finally:
        for process in processes:
            process.kill()  # those that have ended do not mind
            process.wait()
    return lines, transcript


def check_launch(num_ranks, *arguments, **environment):
    lines, transcript = launch(num_ranks, *arguments, **environment)
    assert sum(1 for line in lines if line.get("done")) == num_ranks, transcript
    return lines


@two_gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["ipc", "nccl", "auto"])
def test_one_process_per_gpu(transport, dtype):
    check_launch(2, "--transport", transport, "--dtype", dtype, "--steps", "12")


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_processes_that_share_gpus(transport, num_ranks):
    check_launch(num_ranks, "--transport", transport, "--steps", "4")


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_killed_rank_is_named(transport):
    lines, transcript = launch(2, "--transport", transport, "--steps", "50", "--kill-rank", "1")
    assert {"rank": 0, "lost": 1} in lines, transcript
