"""Pipelines on GPUs compute what a plain loop computes.

Would catch: a buffer reused while a stream still reads it, a message sent before it was
computed, a stream that does not wait, gradients added twice or not at all.
"""

import threading

import pytest
import torch
from gpu_launch import NUM_GPUS, check_launch, launch, two_gpus
from gpu_model import check_close, gradients_of, loss_fn, make_batch, make_stages, plain_loop

import rrfp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
BUSY_CYCLES = 400_000


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


@pytest.mark.parametrize("lookahead", ["jit", "eager", 1])
@pytest.mark.parametrize("options", [{"hint": "1f1b", "slack": 0}, {"split_backward": True}],
                         ids=["fixed", "split"])
def test_look_ahead(options, lookahead, seed):
    run_here(["cuda:0"] * 3, torch.float32, seed, lookahead=lookahead, **options)


@pytest.mark.parametrize("options", [{}, {"split_backward": True}], ids=["whole", "split"])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_backward_runs_in_its_workers_thread(num_ranks, options, seed):
    stages = make_stages(seed, ["cuda:0"] * num_ranks, torch.float32)
    forwards, backwards = {}, {}
    for index, stage in enumerate(stages):
        def note(module, args, output, index=index):
            forwards.setdefault(index, set()).add(threading.get_ident())
            output.register_hook(
                lambda _: backwards.setdefault(index, set()).add(threading.get_ident()))

        stage.register_forward_hook(note)
    inputs, targets = make_batch(seed, 5, "cuda:0", torch.float32)
    rrfp.run_pipeline(stages, inputs, targets, loss_fn, **options)
    assert backwards == forwards and all(len(threads) == 1 for threads in forwards.values())
    assert torch.autograd.is_multithreading_enabled()  # again, where the caller is the worker


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


@two_gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["ipc", "nccl", "auto"])
def test_one_process_per_gpu(transport, dtype):
    check_launch(2, "--transport", transport, "--dtype", dtype, "--steps", "12")


@two_gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placement", [("loop", "1"), ("v", "2")])
def test_two_processes_add_in_products(placement, dtype):
    check_launch(2, "--add-in-products", "--dtype", dtype, "--steps", "12",
                 "--placement", placement[0], "--stages-per-rank", placement[1])


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_processes_that_share_gpus(transport, num_ranks):
    check_launch(num_ranks, "--transport", transport, "--steps", "4")


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_killed_rank_is_named(transport):
    lines, transcript = launch(2, "--transport", transport, "--steps", "50", "--kill-rank", "1")
    assert [(line["error"], line["lost"]) for line in lines] == [("PeerLostError", 1)], transcript


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_rank_killed_at_set_up_is_named(transport):
    lines, transcript = launch(2, "--transport", transport, "--kill-rank", "1",
                               "--kill-at", "set-up", "--timeout-s", "15")
    assert len(lines) == 1 and "rank 1" in lines[0]["text"], transcript


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_rank_that_leaves_at_set_up_is_told_to_those_who_connect(transport):
    lines, transcript = launch(2, "--transport", transport, "--kill-rank", "1",
                               "--kill-at", "leave", "--timeout-s", "150")
    assert [line["error"] for line in lines] == ["RankTimeoutError"], transcript
    assert "rank 1 left it with KeyboardInterrupt" in lines[0]["text"], transcript
    assert lines[0]["seconds"] < 60, transcript


@two_gpus
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_sources_in_expandable_segments(transport):
    check_launch(2, "--transport", transport, "--steps", "8", "--longest", "3000",
                 PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
                 PYTORCH_ALLOC_CONF="expandable_segments:True")


@two_gpus
def test_nccl_with_one_connection_is_refused():
    lines, transcript = launch(2, "--transport", "nccl", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert not lines
    assert "hang when CUDA_DEVICE_MAX_CONNECTIONS is 1" in transcript, transcript


class Watched(torch.nn.Module):
    """Remembers where its input and its output were."""

    def __init__(self, change):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, device="cuda:0"))
        self.change, self.inputs, self.outputs = change, [], []

    def forward(self, hidden):
        self.inputs.append(hidden.data_ptr())
        hidden = self.change(hidden * self.weight)
        self.outputs.append(hidden.data_ptr())
        return hidden


def test_ranks_on_one_gpu_share_without_a_copy():
    stages = [Watched(torch.sin) for _ in range(3)]
    batch = [torch.ones(1 << 12, 8, device="cuda:0") for _ in range(4)]
    rrfp.run_pipeline(stages, batch, batch, loss_fn, hint="1f1b", slack=0)
    for source, target in zip(stages, stages[1:], strict=False):
        assert source.outputs == target.inputs


def test_a_write_into_a_shared_value_is_seen():
    """Autograd of the stage that needs the value refuses; no gradient is silently wrong."""
    class Writes(torch.nn.Module):
        def forward(self, hidden):
            return hidden.mul_(2.0)

    stages = [Watched(torch.tanh), Writes().cuda()]  # tanh needs its output for its gradient
    batch = [torch.ones(4, 8, device="cuda:0") for _ in range(2)]
    with pytest.raises(rrfp.StageError, match="modified by an inplace operation"):
        rrfp.run_pipeline(stages, batch, batch, loss_fn)
