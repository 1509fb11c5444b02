"""The caller's modes hold inside the stages, and a pipeline lives through many different steps.

Would catch: worker threads that start from torch's defaults, state left over from a step, a
thread, descriptor or buffer leaked at every step.
"""

import gc
import os
import threading

import parity_model as model
import pytest
import torch
from parity_group import worker_group
from passing_threads import num_threads, wait_for_passing_threads

import rrfp

MODES = pytest.mark.parametrize("mode", ["threads", "processes"])
P, M = 3, 4


def in_group(mode, function, *args):
    group = worker_group(1, False) if mode == "threads" else worker_group(P)
    return group.values(function, mode, *args)


class Setup:
    """Stages, batch and call of one process; ``plain`` is the reference with equal weights."""

    def __init__(self, rank, mode, dtype=torch.float64, seed=5):
        self.threads = mode == "threads"
        self.all = [model.RecordingStage(seed, s, dtype) for s in range(P)]
        self.plain = [model.RecordingStage(seed, s, dtype) for s in range(P)]
        self.owned = list(range(P)) if self.threads else [rank]
        self.stages = self.all if self.threads else {rank: self.all[rank]}
        self.dtype, self.rank = dtype, rank

    def batch(self, step, count=M):
        inputs, targets, _ = model.make_batch(9, step, count, self.dtype)
        return inputs, targets

    def call(self, inputs, targets, loss_fn=model.squared_error, **options):
        return rrfp.run_pipeline(
            self.stages,
            inputs if 0 in self.owned else None,
            targets if P - 1 in self.owned else None,
            loss_fn,
            stall_timeout_s=30.0,
            **options,
        )

    def check(self, bound=1e-10):
        for s in self.owned:
            pairs = zip(self.all[s].named_parameters(), self.plain[s].parameters(), strict=True)
            for (name, got), want in pairs:
                error = model.gradient_error(got.grad, want.grad)
                assert error <= bound, f"{s}.{name} is off by {error:.3g}"


def run_autocast(rank, num_ranks, mode):
    setup = Setup(rank, mode, torch.float32)
    inputs, targets = setup.batch(0)
    seen = []
    for s in setup.owned:
        setup.all[s].mix.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = setup.call(inputs, targets, hint="1f1b", slack=0).losses
        expected = model.plain_loop(setup.plain, inputs, targets, model.squared_error, [1 / M] * M)
    assert set(seen) == {torch.bfloat16}
    setup.check(1e-5)
    if losses is not None:
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected))


@MODES
def test_autocast(mode):
    in_group(mode, run_autocast)


def run_defaults(rank, num_ranks, mode):
    """Default dtype and device of the caller's thread are those of the stages."""
    setup = Setup(rank, mode)
    inputs, targets = setup.batch(0)
    seen = []

    def look(module, args, output):
        seen.append((torch.empty(0).dtype, torch.empty(0).device.type))

    for s in setup.owned:
        setup.all[s].mix.register_forward_hook(look)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            setup.call(inputs, targets)
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(seen) == {(torch.float64, "meta")}
    seen.clear()
    setup.call(inputs, targets)
    assert set(seen) == {(torch.float32, "cpu")}


@MODES
def test_default_dtype_and_device(mode):
    in_group(mode, run_defaults)


def run_saved_tensor_hooks(rank, num_ranks, mode):
    setup = Setup(rank, mode)
    inputs, targets = setup.batch(0)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    def unpack(tensor):
        unpacked.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        setup.call(inputs, targets)
    assert len(packed) >= len(setup.owned) * M
    assert unpacked
    count = len(packed)
    setup.call(inputs, targets)
    assert len(packed) == count, "hooks outlived the caller's context"
    for _ in range(2):
        model.plain_loop(setup.plain, inputs, targets, model.squared_error, [1 / M] * M)
    setup.check()


@MODES
def test_saved_tensor_hooks(mode):
    in_group(mode, run_saved_tensor_hooks)


def run_forward_only(rank, num_ranks, mode, grad_mode):
    setup = Setup(rank, mode)
    inputs, targets = setup.batch(0)
    for s in setup.owned:
        setup.all[s].eval()
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[
        grad_mode
    ]():
        result = setup.call(inputs, targets, forward_only=True, return_outputs=True)
        alone = setup.call(inputs, None, None, forward_only=True, return_outputs=True)
    assert all(p.grad is None for s in setup.owned for p in setup.all[s].parameters())
    assert all(not setup.all[s].training for s in setup.owned)
    assert all(setup.all[s].calls == 2 * M for s in setup.owned)
    if P - 1 in setup.owned:
        with torch.no_grad():
            for m, (value, target) in enumerate(zip(inputs, targets, strict=True)):
                for stage in setup.plain:
                    value = stage(*value)
                torch.testing.assert_close(result.outputs[m][0], value[0])
                torch.testing.assert_close(alone.outputs[m][0], value[0])
                torch.testing.assert_close(result.losses[m], model.squared_error(value, target))
    setup.call(inputs, targets)  # and training goes on
    model.plain_loop(setup.plain, inputs, targets, model.squared_error, [1 / M] * M)
    setup.check()


@MODES
@pytest.mark.parametrize("grad_mode", ["no_grad", "inference", "grad"])
def test_forward_only(mode, grad_mode):
    in_group(mode, run_forward_only, grad_mode)


def run_changing_steps(rank, num_ranks, mode):
    """One set of stages; M, hint, order, limit and loss change from step to step."""
    setup = Setup(rank, mode)
    plain_step = torch.optim.AdamW([p for s in setup.plain for p in s.parameters()], lr=0.05)
    step = torch.optim.AdamW([p for s in setup.owned for p in setup.all[s].parameters()], lr=0.05)
    settings = [
        (4, {}),
        (1, {"hint": "gpipe"}),
        (7, {"hint": "1f1b", "slack": 0}),
        (7, {"max_in_flight": 1}),
        (2, {"microbatch_order": [1, 0]}),
        (5, {"hint": "f-priority"}),
    ]
    for index, (count, options) in enumerate(settings):
        inputs, targets = setup.batch(index, count)
        setup.call(inputs, targets, loss_reduction="sum", **options)
        model.plain_loop(setup.plain, inputs, targets, model.squared_error, [1.0] * count)
        setup.check()
        if index % 2:  # gradients accumulate over two steps
            for optimizer in (step, plain_step):
                optimizer.step()
                optimizer.zero_grad(set_to_none=index % 4 == 1)
    for s in setup.owned:
        for got, want in zip(setup.all[s].parameters(), setup.plain[s].parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@MODES
def test_steps_that_differ(mode):
    in_group(mode, run_changing_steps)


def resident_kib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def run_many_steps(rank, num_ranks, mode, steps):
    setup = Setup(rank, mode)
    inputs, targets = setup.batch(0)
    samples = []
    for index in range(steps):
        setup.call(inputs, targets)
        for stage in setup.all:
            stage.log.clear()
        if index in (steps // 4, steps - 1):
            gc.collect()
            wait_for_passing_threads()
            samples.append(
                (
                    len(os.listdir("/proc/self/fd")),
                    threading.active_count(),
                    num_threads(),
                    resident_kib(),
                )
            )
    return samples


@MODES
def test_many_steps_do_not_grow(mode):
    for first, last in in_group(mode, run_many_steps, 400):
        # Fewer are no harm: an earlier pipeline may have been given up meanwhile.
        grown = [a for a, b in zip(first[:3], last[:3], strict=True) if b > a]
        assert not grown, f"descriptors or threads grew with the steps: {first} to {last}"
        assert last[3] - first[3] < 8 * 1024, f"resident memory: {first[3]} to {last[3]} KiB"


def run_many_pipelines(rank, num_ranks, mode, rounds):
    """New modules every time, the old ones dropped: their pipelines must go with them."""
    samples = []
    for index in range(rounds):
        setup = Setup(rank, mode, seed=index)
        setup.call(*setup.batch(index))
        del setup
        if index in (rounds // 2, rounds - 1):
            gc.collect()
            samples.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return samples


@MODES
def test_dropped_stages_free_their_pipeline(mode):
    for first, last in in_group(mode, run_many_pipelines, 12):
        assert all(b <= a + 2 for a, b in zip(first, last, strict=True)), (first, last)


def run_metrics(rank, num_ranks, mode, broadcast):
    setup = Setup(rank, mode)
    inputs, targets = setup.batch(0)

    def loss_fn(output, target):
        loss = model.squared_error(output, target)
        return loss, {"rows": len(target), "microbatch": output[1]}

    result = setup.call(
        iter(inputs),
        iter(targets),
        loss_fn,
        num_microbatches=M,
        broadcast_loss=broadcast,
        microbatch_order=[3, 1, 2, 0],
    )
    expected = model.plain_loop(setup.plain, inputs, targets, model.squared_error, [1 / M] * M)
    setup.check()
    if P - 1 in setup.owned or broadcast:
        torch.testing.assert_close(torch.stack(list(result.losses)), torch.stack(expected))
    else:
        assert result.losses is None
    if P - 1 in setup.owned:
        assert [x["microbatch"] for x in result.metrics] == list(range(M))
        assert [x["rows"] for x in result.metrics] == [len(t) for t in targets]


@MODES
@pytest.mark.parametrize("broadcast", [False, True])
def test_metrics_iterators_and_broadcast(mode, broadcast):
    in_group(mode, run_metrics, broadcast)
