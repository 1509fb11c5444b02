"""Stages that handle streams and devices in their own way, on GPUs.

Would catch: received memory that goes to the next message while a stream that the stage has forked
still reads it; an output sent before it is computed, because the stage left another stream current;
a shared value marked as read on the stream of another device; the failure of a kernel hidden
behind one that follows from it.
"""

import re

import pytest
import torch
from gpu_launch import NUM_GPUS, check_launch, launch, two_gpus

import rrfp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
PROGRAM = "gpu_streams_rank.py"
TRANSPORTS = ["ipc", pytest.param("nccl", marks=two_gpus)]
SLOW_CYCLES = 30_000_000


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_forked_stream_reads_stays(transport):
    check_launch(2, "--case", "joins", "--transport", transport, program=PROGRAM)


def test_another_stream_left_current_is_told():
    lines, transcript = launch(2, "--case", "leaves", program=PROGRAM)
    assert [line.get("error") for line in lines] == ["StageError", "StageError"], transcript
    assert all("stage 1 left another stream of cuda:" in line["text"] for line in lines), transcript


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_kernel_is_told_on_both_ranks(transport):
    lines, transcript = launch(2, "--case", "asserts", "--transport", transport, program=PROGRAM)
    assert {line.get("error") for line in lines} <= {"StageError", "DeviceError"}, transcript
    assert [line["rank"] for line in lines] == [1, 1], transcript
    # What comes to light first: the assertion, or a library that fails for it inside the stage.
    words = re.compile("device-side assert|CUDA error")
    assert all(words.search(line["text"]) for line in lines), transcript


class Leaving(torch.nn.Module):
    """x @ w; leaves the other device current, and its backward reads the gradient late."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(512, 512, dtype=torch.float64) / 512)

    def forward(self, x):
        hidden = x @ self.weight
        torch.cuda.set_device(1)
        hidden.register_hook(self.late)
        return hidden

    @staticmethod
    def late(gradient):
        with torch.cuda.device(gradient.device):
            torch.cuda._sleep(SLOW_CYCLES)


@two_gpus
def test_another_device_left_current_harms_nothing(seed):
    torch.manual_seed(seed)
    stages = [Leaving().to("cuda:0"), torch.nn.Linear(512, 512, dtype=torch.float64).to("cuda:0")]
    batch = [torch.randn(512, 512, dtype=torch.float64).to("cuda:0") for _ in range(12)]
    for x in batch:
        hidden = torch.nn.functional.linear(x @ stages[0].weight, *stages[1].parameters())
        ((hidden - x).square().mean() / len(batch)).backward()
    expected = [p.grad for stage in stages for p in stage.parameters()]
    for stage in stages:
        stage.zero_grad()
    rrfp.run_pipeline(
        stages, batch, batch, torch.nn.functional.mse_loss, hint="gpipe", max_in_flight=12,
        split_backward=False, lookahead="eager",
    )
    assert torch.cuda.current_device() == 0
    for found, reference in zip((p.grad for s in stages for p in s.parameters()), expected):
        assert (found - reference).norm() <= 1e-10 * reference.norm()
