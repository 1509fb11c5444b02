"""What rrfp itself costs per task, with stages that do almost nothing.

Each figure is the median over rounds in which the direct loop and rrfp alternate:
- host cost of a task: step time less the time of running the same stage functions directly
  (forward, loss, backward, cut at the stage boundaries), divided by the tasks that ran one
  after the other. Stages of one process share the GIL, so there all tasks count; between
  processes, those of one rank, which then also waits for the other. Threads on several cores
  pass the GIL on at every operation of torch, which is a price of threads, not of rrfp. So two
  ranks are also held against two bare threads, each of which runs one stage's calls without
  rrfp and without the other's results; "one core" is without that price.
- the same in processor time (all threads of the process), which a busy machine spoils less.
- rrfp's own report: from a task's end to the next choice.
- arrival to start: from an input's arrival at a worker that has been idle for 3 ms, or for 0.2, to
  its stage function; once as this machine has it, once as one with three cores for each rank,
  where idle workers spin. `plain` is a call of the same stage alone, by a thread that was busy
  until then or slept as long: how slow an idle processor is at first, whatever it runs.

    python benchmarks/host_cost.py [--rounds 15] [--microbatches 64] [--out host_cost]
"""

import argparse
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import record
import torch
from processes import run_ranks
from torch import nn

WIDTH = 8
HOPS = 200
IDLE_MS, IDLE_STEP = (3, 0.2), 8  # before each forward; microbatches of a step
SPIN_US = 5000
WARM_UP = 10  # a session of several ranks has tried by then whether they take turns


class Scale(nn.Module):
    """A stage of one operation; ``started`` holds when its forwards began."""

    def __init__(self, pause_s=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.pause_s = pause_s
        self.started, self.ended = [], []

    def forward(self, hidden):
        self.started.append(time.monotonic_ns())
        if self.pause_s:
            time.sleep(self.pause_s)
        hidden = hidden * self.weight
        self.ended.append(time.monotonic_ns())
        return hidden


def loss_fn(output, target):
    return (output - target).square().mean()


def batch(count):
    return [torch.ones(4, WIDTH) for _ in range(count)], [torch.zeros(4, WIDTH)] * count


class Clocks:
    """Microseconds of wall and processor time since it was made."""

    def __init__(self):
        self.wall_s, self.processor_s = time.perf_counter(), time.process_time()

    def elapsed_us(self):
        wall_s = time.perf_counter() - self.wall_s
        return 1e6 * wall_s, 1e6 * (time.process_time() - self.processor_s)


def direct_us(stages, count, is_source=True):
    """The same calls without rrfp, on one thread, cut where the boundaries are. Without
    ``is_source`` the first stage's inputs need a gradient too, as those of a later rank do."""
    inputs, targets = batch(count)
    clocks = Clocks()
    for value, target in zip(inputs, targets, strict=True):
        boundaries = []
        for index, stage in enumerate(stages):
            if index or not is_source:
                value = value.detach().requires_grad_()
            output = stage(value)
            boundaries.append((value, output))
            value = output
        (loss_fn(value, target) / count).backward()
        for (_, output), (entered, _) in zip(boundaries[-2::-1], boundaries[:0:-1], strict=True):
            torch.autograd.backward(output, entered.grad)
    return clocks.elapsed_us()


def bare_threads_us(stages, count, pool):
    """The same calls without rrfp, each stage's on a thread of its own, none waiting for another's
    results."""
    inputs, targets = batch(count)
    gradients = batch(count)[0]
    begin = threading.Barrier(len(stages) + 1)

    def run(index, stage):
        is_last = index == len(stages) - 1
        begin.wait()
        for value, target, gradient in zip(inputs, targets, gradients, strict=True):
            value = value.detach().requires_grad_(index > 0)
            output = stage(value)
            if is_last:
                (loss_fn(output, target) / count).backward()
            else:
                torch.autograd.backward(output, gradient)

    runs = [pool.submit(run, index, stage) for index, stage in enumerate(stages)]
    clocks = Clocks()
    begin.wait()
    for one in runs:
        one.result()
    return clocks.elapsed_us()


def timed_step(stages, count, source, loss):
    """((wall us, processor us), this rank's or the first rank's line of the report)."""
    import rrfp

    inputs, targets = batch(count)
    clocks = Clocks()
    result = rrfp.run_pipeline(
        stages, inputs if source else None, targets if loss else None, loss_fn, hint="1f1b"
    )
    return clocks.elapsed_us(), result.report.ranks[0]


class Comparison:
    """Per round: a step, the direct loop beside it, and how many tasks they ran."""

    def __init__(self, num_tasks):
        self.num_tasks = num_tasks
        self.figures = {}

    def add(self, direct, took, line, bare_threads=None):
        per_task = {
            "us_per_task_over_direct": (took[0] - direct[0]) / self.num_tasks,
            "cpu_us_per_task_over_direct": (took[1] - direct[1]) / self.num_tasks,
            "us_per_task_reported": line.host_s * 1e6 / line.num_tasks,
            "us_per_task_direct": direct[0] / self.num_tasks,
        }
        if bare_threads is not None:
            per_task["us_per_task_over_bare_threads"] = (took[0] - bare_threads[0]) / self.num_tasks
            per_task["us_per_task_bare_threads"] = bare_threads[0] / self.num_tasks
        for name, value in per_task.items():
            self.figures.setdefault(name, []).append(value)

    def summary(self):
        return {name: record.quantiles(values) for name, values in self.figures.items()}


def in_one_process(num_ranks, arguments):
    """All stages here; their threads share the GIL, so all tasks count."""
    count = arguments.microbatches
    stages = [Scale() for _ in range(num_ranks)]
    comparison = Comparison(2 * count * num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        for index in range(-WARM_UP, arguments.rounds):
            direct = direct_us(stages, count)
            took, line = timed_step(stages, count, True, True)
            bare_threads = bare_threads_us(stages, count, pool) if num_ranks > 1 else None
            if index >= 0:
                comparison.add(direct, took, line, bare_threads)
    return comparison.summary()


def on_one_core(measure, *arguments):
    """``measure(*arguments)`` with all threads of this process on one core."""
    cores = {task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}
    one = {min(os.sched_getaffinity(0))}
    for task in cores:
        os.sched_setaffinity(int(task), one)
    try:
        return measure(*arguments)
    finally:
        for task, allowed in cores.items():
            os.sched_setaffinity(int(task), allowed)


def between_processes(rank, arguments):
    """One of two ranks. Rank 1, which has a loss as the direct loop has, gives the summary."""
    import torch.distributed as dist

    count = arguments.microbatches
    stage = Scale()
    comparison = Comparison(2 * count)
    for index in range(-WARM_UP, arguments.rounds):
        dist.barrier()
        direct = direct_us([stage], count, is_source=False) if rank == 1 else None
        dist.barrier()
        took, line = timed_step({rank: stage}, count, rank == 0, rank == 1)
        if index >= 0 and rank == 1:
            comparison.add(direct, took, line)
    return {**comparison.summary(), **arrival_latency(rank, dist)}


def spinning_arrival(rank):
    import torch.distributed as dist

    return arrival_latency(rank, dist)


def arrival_latency(rank, dist):
    """Of rank 1's forwards, each of which finds its worker idle, because the first stage sleeps."""
    figures = {}
    for idle_ms in IDLE_MS:
        stage = Scale(idle_ms / 1000 if rank == 0 else 0.0)
        arrivals = []
        for _ in range(HOPS // IDLE_STEP):
            _, line = timed_step({rank: stage}, IDLE_STEP, rank == 0, rank == 1)
            ready = [task.ready_ns for task in line.records if "F" in task.task]
            arrivals += [
                (start - at) / 1e3
                for start, at in zip(stage.started[-IDLE_STEP:], ready, strict=True)
            ]
        sent = [None, None]
        dist.all_gather_object(sent, (stage.started, stage.ended))
        hops = [(start - end) / 1e3 for start, end in zip(sent[1][0], sent[0][1], strict=True)]
        if rank == 1:
            plain = plain_us(Scale(), torch.ones(4, WIDTH), idle_ms / 1000)
            figures |= {f"us_{name}_after_{idle_ms}_ms": record.quantiles(values[HOPS // 10 :])
                        for name, values in (("stage_end_to_next_start", hops),
                                             ("arrival_to_start", arrivals),
                                             ("plain_call", plain))}
    if rank == 1:
        figures["us_plain_call_warm"] = record.quantiles(
            plain_us(Scale(), torch.ones(4, WIDTH), 0.0)[HOPS // 10 :])
    return figures


def plain_us(stage, value, pause_s, settle=lambda: None):
    """How long each of many calls of a stage takes, after a sleep, without rrfp."""
    found = []
    for _ in range(HOPS):
        time.sleep(pause_s)
        began = time.perf_counter_ns()
        stage(value.detach().requires_grad_())
        found.append((time.perf_counter_ns() - began) / 1e3)
        settle()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--out", default="host_cost", help="name of the result file, or empty")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    both = run_ranks(between_processes, 2, arguments, timeout_s=300)
    os.environ["RRFP_SPIN_US"] = str(SPIN_US)  # the processes inherit it
    spinning = run_ranks(spinning_arrival, 2, timeout_s=300)
    del os.environ["RRFP_SPIN_US"]
    table = {
        "one process, one rank": in_one_process(1, arguments),
        "one process, two ranks": in_one_process(2, arguments),
        "one process, two ranks, one core": on_one_core(in_one_process, 2, arguments),
        "two processes": {**both[0], **both[1]},
        "two processes, idle ones spin": {**spinning[0], **spinning[1]},
    }
    for name, figures in table.items():
        print(name)
        for key, (low, middle, high) in figures.items():
            print(f"  {key:<28}{middle:>8.1f}   (quartiles {low:.1f} to {high:.1f})")
    if arguments.out:
        record.write(arguments.out, {"arguments": vars(arguments), "table": table})


if __name__ == "__main__":
    main()
