"""torch.profiler sees one range per task, named by its text, around all that the task does.

Worker threads are seen where torch is asked for all threads. On a GPU each kernel was launched
inside exactly one task. Would catch: a range without an end, work of a task outside its range.
"""

import os
import tempfile

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import rrfp

NUM_STAGES, NUM_MICROBATCHES = 3, 4
TASKS = {
    f"{stage}{kind}{microbatch}"
    for stage in range(NUM_STAGES)
    for kind in "FIW"
    for microbatch in range(NUM_MICROBATCHES)
}
PREFIX = "rrfp "


def make_stages(device):
    return [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(device) for _ in range(NUM_STAGES)]


def run(stages, device, **options):
    batch = [torch.ones(2, 8, device=device) for _ in range(NUM_MICROBATCHES)]
    rrfp.run_pipeline(
        stages, batch, batch, nn.functional.mse_loss, split_backward=True, **options
    )


def task_ranges(events):
    """[(task text, thread, start, end)], in us."""
    return [
        (e.name.removeprefix(PREFIX), e.thread, e.time_range.start, e.time_range.end)
        for e in events
        if e.name.startswith(PREFIX) and e.device_type == torch.autograd.DeviceType.CPU
    ]


def check_apart(ranges):
    """One range per task, and on each thread one after the other."""
    assert sorted(text for text, _, _, _ in ranges) == sorted(TASKS)
    for thread in {thread for _, thread, _, _ in ranges}:
        spans = sorted((start, end) for _, t, start, end in ranges if t == thread)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


def test_a_range_per_task():
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    stages = make_stages("cpu")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as found:
        run(stages, "cpu")
    ranges = task_ranges(found.events())
    check_apart(ranges)
    products = [e for e in found.events() if e.name == "aten::addmm"]
    assert len(products) == NUM_STAGES * NUM_MICROBATCHES
    for event in products:
        at = event.time_range.start
        around = [r for r in ranges if r[1] == event.thread and r[2] <= at <= r[3]]
        assert len(around) == 1 and "F" in around[0][0], (event.thread, around)


def test_no_range_without_a_profiler(monkeypatch):
    def refuse(name):
        raise AssertionError(f"a range {name} was made")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    run(make_stages("cpu"), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_kernel_of_a_step_lies_under_one_task():
    """One rank is a process of its own: its tasks are launched by the profiled thread, and their
    backward by autograd's, meanwhile."""
    dist = torch.distributed
    store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        stages = dict(enumerate(make_stages("cuda")))
        run(stages, "cuda")  # set-up and warm-up have kernels of their own
        batch = [torch.ones(2, 8, device="cuda") for _ in range(NUM_MICROBATCHES)]
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            rrfp.run_pipeline(
                stages, batch, batch, nn.functional.mse_loss, split_backward=True
            )
            torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()
    ranges = task_ranges(found.events())
    check_apart(ranges)
    kineto = found.profiler.kineto_results.events()
    launches = {
        e.correlation_id(): e.start_ns()
        for e in kineto
        if e.device_type() == torch.autograd.DeviceType.CPU and "Launch" in e.name()
    }
    kernels = [
        e for e in kineto
        if e.device_type() == torch.autograd.DeviceType.CUDA
        and not e.name().startswith(("Mem", PREFIX))
    ]
    origin_ns = found.profiler.kineto_results.trace_start_ns()
    assert len(kernels) > 3 * len(TASKS), "the kernels were not captured"
    for kernel in kernels:
        at = (launches[kernel.correlation_id()] - origin_ns) / 1000
        around = [text for text, _, start, end in ranges if start <= at <= end]
        assert len(around) == 1, f"{kernel.name()} was launched under {around}"
