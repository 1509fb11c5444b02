"""What rrfp itself costs per task, with stages that do almost nothing.

Three figures, each the median over rounds in which all variants alternate:
- host cost of a task: step time less the time of running the same stage functions directly
  (forward, loss, backward, cut at the stage boundaries), divided by the tasks that ran one
  after the other. Stages of one process share the GIL, so there all tasks count; between
  processes, those of one rank.
- rrfp's own report of the same, from retire to the next claim.
- arrival to start: from an input's arrival at an idle worker to its stage function.

    python benchmarks/host_cost.py [--rounds 15] [--microbatches 64] [--out host_cost]
"""

import argparse
import multiprocessing
import socket
import time

import record
import torch
from torch import nn

WIDTH = 8
HOPS = 200


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


def direct_s(stages, count):
    """The same calls without rrfp: 1F1B's work on one thread, cut where the boundaries are."""
    inputs, targets = batch(count)
    start = time.perf_counter()
    for value, target in zip(inputs, targets, strict=True):
        boundaries = []
        for index, stage in enumerate(stages):
            if index:
                value = value.detach().requires_grad_()
            output = stage(value)
            boundaries.append((value, output))
            value = output
        (loss_fn(value, target) / count).backward()
        for (_, output), (entered, _) in zip(boundaries[-2::-1], boundaries[:0:-1], strict=True):
            torch.autograd.backward(output, entered.grad)
    return time.perf_counter() - start


def timed_step(stages, count, source, loss):
    """(seconds, this rank's or the first rank's line of the report)."""
    import rrfp

    inputs, targets = batch(count)
    start = time.perf_counter()
    result = rrfp.run_pipeline(
        stages, inputs if source else None, targets if loss else None, loss_fn, hint="1f1b"
    )
    return time.perf_counter() - start, result.report.ranks[0]


def in_one_process(num_ranks, arguments):
    """us per task over the direct loop, by difference and by rrfp's report."""
    count = arguments.microbatches
    stages = [Scale() for _ in range(num_ranks)]
    differences, reported, plain = [], [], []
    for index in range(-3, arguments.rounds):
        direct = direct_s(stages, count)
        took, line = timed_step(stages, count, True, True)
        if index >= 0:
            tasks = 2 * count * num_ranks
            differences.append((took - direct) * 1e6 / tasks)
            reported.append(line.host_s * 1e6 / line.num_tasks)
            plain.append(direct * 1e6 / tasks)
    return summary(differences, reported, plain)


def summary(differences, reported, plain):
    return {
        "us_per_task_over_direct": record.quantiles(differences),
        "us_per_task_reported": record.quantiles(reported),
        "us_per_task_direct": record.quantiles(plain),
    }


def between_processes(rank, port, arguments, results):
    """Two ranks; rank 0 answers with its summary, rank 1 with the arrival latencies."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    count = arguments.microbatches
    stage = Scale()
    differences, reported, plain = [], [], []
    for index in range(-3, arguments.rounds):
        dist.barrier()
        direct = direct_s([stage], count) if rank == 0 else 0.0
        dist.barrier()
        took, line = timed_step({rank: stage}, count, rank == 0, rank == 1)
        if index >= 0 and rank == 0:
            differences.append((took - direct) * 1e6 / (2 * count))
            reported.append(line.host_s * 1e6 / line.num_tasks)
            plain.append(direct * 1e6 / (2 * count))
    answer = summary(differences, reported, plain) if rank == 0 else {}
    answer.update(arrival_latency(rank, dist))
    results.put((rank, answer))
    dist.barrier()
    dist.destroy_process_group()


def arrival_latency(rank, dist):
    """Steps of one microbatch whose first stage sleeps: rank 1's worker is idle when it comes."""
    stage = Scale(0.003 if rank == 0 else 0.0)
    arrivals = []
    for _ in range(HOPS):
        _, line = timed_step({rank: stage}, 1, rank == 0, rank == 1)
        if rank == 1:
            arrivals.append((stage.started[-1] - line.records[0].ready_ns) / 1e3)
    sent = [None, None]
    dist.all_gather_object(sent, (stage.started, stage.ended))
    hops = [(start - end) / 1e3 for start, end in zip(sent[1][0], sent[0][1], strict=True)]
    own = {} if rank == 0 else {"us_arrival_to_start": record.quantiles(arrivals[HOPS // 10:])}
    return {**own, "us_stage_end_to_next_start": record.quantiles(hops[HOPS // 10:])}


def run_processes(arguments):
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    ranks = [
        context.Process(target=between_processes, args=(rank, port, arguments, results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    answers = dict(results.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join()
    return {**answers[0], **answers[1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--out", default="host_cost", help="name of the result file, or empty")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = {
        "one process, one rank": in_one_process(1, arguments),
        "one process, two ranks": in_one_process(2, arguments),
        "two processes": run_processes(arguments),
    }
    for name, figures in table.items():
        print(name)
        for key, (low, middle, high) in figures.items():
            print(f"  {key:<28}{middle:>8.1f}   (quartiles {low:.1f} to {high:.1f})")
    if arguments.out:
        record.write(arguments.out, {"arguments": vars(arguments), "table": table})


if __name__ == "__main__":
    main()
